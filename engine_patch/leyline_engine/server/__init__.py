"""A serving engine's HTTP process: routes beside its own, and what its answers carry."""
