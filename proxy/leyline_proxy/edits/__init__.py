"""Apply policies and the caller's own edits to the messages: step 3 in ARCHITECTURE.md."""
