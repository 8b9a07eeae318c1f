"""The policies that come with Leyline, each in a module of its own that is imported on demand."""

from __future__ import annotations

BUILTINS: dict[str, str] = {
    "drop_failed_calls": "DropFailedCalls",
    "keep_all": "KeepAll",
    "redact": "Redact",
    "truncate_older_than": "TruncateOlderThan",
}
"""Name of the policy, which is its module's too, to the class in it."""
