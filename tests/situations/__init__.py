"""Situations that people met in public bug reports, and more of the same kinds, as small deterministic inputs."""
