"""Benchmarks of a running engine, as ``leyline bench`` finds them."""
