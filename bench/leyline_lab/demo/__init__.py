"""The demonstration: a recorded agent session, the script that records it, and its replay."""

DEFAULT_POLICY = "truncate_older_than:n=8,max_chars=200 | drop_failed_calls"
"""Policy that edits the session's history before each turn."""
