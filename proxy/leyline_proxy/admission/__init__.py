"""Admission of requests: fair queueing across tenants, and rate limits."""

from .gate import AdmissionGate
from .places import FairPlaces

__all__ = ["AdmissionGate", "FairPlaces"]
