"""The HTTP surface: routes, errors, streaming and the status page."""
