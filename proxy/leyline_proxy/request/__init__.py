"""Read requests, and find their sessions: step 2 in ARCHITECTURE.md."""
