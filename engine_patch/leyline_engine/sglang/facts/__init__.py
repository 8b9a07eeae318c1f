"""Facts of the running server and model, and which of them allow splicing."""
