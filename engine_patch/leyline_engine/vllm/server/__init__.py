"""Leyline on vLLM's own HTTP server: its routes, and what its requests and answers carry."""
