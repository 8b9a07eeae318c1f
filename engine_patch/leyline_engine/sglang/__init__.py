"""Leyline inside SGLang: a plugin that splices the KV pool, and a platform for CPUs."""
