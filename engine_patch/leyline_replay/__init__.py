"""The replay engine: an in-process SGLang stand-in over Hugging Face transformers."""
