"""Rows of the KV pool: where they lie, how they are read, moved and rotated."""
