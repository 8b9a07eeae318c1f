"""The audit log: who edited what, and what became of it, as a chain of sealed JSON lines."""
