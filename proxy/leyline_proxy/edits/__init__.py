"""Step 2: apply policies and the caller's own edits to the messages."""
