"""The HTTP surface: routes, errors, streaming and the live page."""
