"""Benchmarks of the engine's parts, found by ``leyline bench`` through entry points."""
