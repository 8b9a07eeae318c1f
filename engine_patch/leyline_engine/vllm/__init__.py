"""Leyline in vLLM: splices through its KV connector interface."""
