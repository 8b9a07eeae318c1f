"""Leyline inside vLLM: a general plugin."""
