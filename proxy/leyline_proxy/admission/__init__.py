"""Admission of requests: fair queueing across tenants, and rate limits."""

from .gate import Gate

__all__ = ["Gate"]
