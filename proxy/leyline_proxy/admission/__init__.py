"""Admission of requests: fair queueing across tenants, and rate limits."""

from .gate import AdmissionGate

__all__ = ["AdmissionGate"]
