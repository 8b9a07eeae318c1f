"""Loading models, the tiny built-in ones, and the facts read off a model."""
