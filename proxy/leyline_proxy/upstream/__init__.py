"""The engine's side of the proxy: transport, client and handshake."""
