"""Step 1: read a request, and find its session."""
