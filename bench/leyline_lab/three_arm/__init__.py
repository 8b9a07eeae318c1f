"""Benchmarks of a running engine, for ``leyline bench``."""
