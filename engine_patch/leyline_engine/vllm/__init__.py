"""The vLLM plugin: a KV connector, a scheduler's hooks and the routes of the API server."""
