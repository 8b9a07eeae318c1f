"""Turns from the request to the session's next state: one class begins them, one ends them.

identify → policies → diff and render → plan → (forward, by the HTTP layer) → account.
"""

from .opener import TurnOpener
from .settler import Account, TurnSettler
from .under_way import TurnsUnderWay

__all__ = ["Account", "TurnOpener", "TurnSettler", "TurnsUnderWay"]
