"""Recorded sessions played against caches without a model: the tokens that reuse would serve."""
