"""Models: loading, the ones that ship, and the facts read off a model."""
