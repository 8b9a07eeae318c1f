"""TLS: certificates that are reloaded, to engines and from clients."""
