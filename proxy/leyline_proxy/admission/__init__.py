"""Who is let in when: fair queueing across tenants, and limits on how often."""

from .gate import Gate

__all__ = ["Gate"]
