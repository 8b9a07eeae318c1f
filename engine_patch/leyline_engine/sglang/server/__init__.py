"""Routes on SGLang's own HTTP server, and what its answers carry."""
