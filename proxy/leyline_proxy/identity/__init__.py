"""Callers who come with tokens of an identity provider instead of API keys."""
