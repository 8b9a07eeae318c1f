"""Stores of evicted texts."""
