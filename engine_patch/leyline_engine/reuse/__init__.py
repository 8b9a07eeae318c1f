"""Content-addressed reuse: identical tokens at another position, found by fingerprints. Pure."""
