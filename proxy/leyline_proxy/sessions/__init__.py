"""Stores that keep sessions between turns."""

from .memory import MemorySessionStore
from .store import SessionChange, SessionStore

__all__ = ["MemorySessionStore", "SessionChange", "SessionStore"]
