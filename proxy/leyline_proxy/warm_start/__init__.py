"""Warm start: the prompts of active sessions, kept encrypted and replayed into a new engine."""
