"""The state that the workers of one proxy share: it lives in their supervisor, the hub, and workers
reach it over a Unix socket."""
