"""The pure core of the proxy: no I/O, no framework."""
