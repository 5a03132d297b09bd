"""What happens: the ops of one training step, the lifetimes of its storages, its peak line, the hardware's speeds.

Knows nothing of plans.
"""
