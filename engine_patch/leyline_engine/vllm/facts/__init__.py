"""Facts of the running worker and model, and which of them allow splicing."""
