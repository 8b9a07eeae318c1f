"""Trying policies on recorded sessions: what they reclaim, and what that costs the cache."""
