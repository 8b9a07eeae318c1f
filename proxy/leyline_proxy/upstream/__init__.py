"""The engine behind the proxy: transport, client and handshake."""
