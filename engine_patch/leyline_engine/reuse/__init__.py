"""Content-addressed reuse: finds runs of a prompt whose KV exists already, at any position."""
