"""Build the parts of the proxy from its settings."""
