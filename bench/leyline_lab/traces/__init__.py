"""Recorded sessions: their files, their tokens and their texts."""
