"""``leyline eval``: the sessions that are measured, the engine's experiments, and the report."""
