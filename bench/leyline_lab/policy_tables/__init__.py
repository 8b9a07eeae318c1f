"""The effects of the built-in policies on recorded sessions: tables in docs/policies.md."""
