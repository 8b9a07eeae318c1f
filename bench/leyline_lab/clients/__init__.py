"""Real clients against the proxy: how each is started, and the faults of its session."""
