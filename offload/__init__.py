"""Where bytes live: the stores on host and disk, staging buffers, and the streaming of model state through them.

Knows nothing of plans.
"""
