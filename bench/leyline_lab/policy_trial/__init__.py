"""Trials of policies on recorded sessions: the reclaimed tokens, and their cost to the cache."""
