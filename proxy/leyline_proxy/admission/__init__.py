"""Admission of requests: fair queueing across tenants, and rate limits."""

from .fair_places import FairPlaces
from .gate import AdmissionGate

__all__ = ["AdmissionGate", "FairPlaces"]
