"""Rows of an engine's KV pool: how they are read, copied, turned to other positions and erased."""
