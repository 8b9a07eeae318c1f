"""Metrics and logs; neither ever holds prompt text."""
