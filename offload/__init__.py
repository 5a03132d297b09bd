"""Where bytes live: the stores on host and disk, staging buffers, and the streaming of model state through them.

`store` says what a place for bytes can do; `nvme` and `host` are such places. `data_file` is the one file of a store on
a disk, `run_directory` keeps runs apart that share a path. `residency` moves one tensor between memory and a store;
`parameters`, `gradients`, `optimizer` and `activations` do it at the right moments of a step. `sizes` has the byte
formulas that planners use too. Knows nothing of plans.
"""
