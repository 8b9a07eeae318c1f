"""The engine's OpenAI-compatible HTTP side."""
