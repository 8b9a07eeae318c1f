"""The audit log: edits, their authors and effects, as a chain of sealed JSON lines."""
