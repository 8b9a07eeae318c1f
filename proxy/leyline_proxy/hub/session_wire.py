"""What workers and hub say to each other about sessions."""

from __future__ import annotations

import msgspec

from ..model.history import HistoryMatch
from ..sessions.summary import SessionOverview
from ..sessions.table import SessionName
from .wire import Method


class Get(msgspec.Struct, array_like=True, frozen=True):
    name: SessionName
    known: bytes
    """The version that the worker has; empty for none."""


class Found(msgspec.Struct, array_like=True, frozen=True):
    version: bytes = b""
    """Empty if there is no session."""
    head: bytes | None = None
    """None if the worker has that version."""
    pieces: dict[int, bytes] = {}
    """Turns by their pieces' numbers, oldest first."""
    open_turns: frozenset[str] = frozenset()


class Replace(msgspec.Struct, array_like=True, frozen=True):
    name: SessionName
    read: bytes
    """The version that was read; empty for none."""
    key: str
    head: bytes
    pieces: tuple[int, ...]
    """Numbers of the turns' pieces, oldest first."""
    new: dict[int, bytes]
    """Those among them that the hub doesn't have."""
    line: SessionOverview
    chain: tuple[int, ...] | None
    ends: str | None


class Replaced(msgspec.Struct, array_like=True, frozen=True):
    version: bytes
    """Empty if another version was written since."""
    now: Found


class Match(msgspec.Struct, array_like=True, frozen=True):
    tenant: str
    key: str
    chain: tuple[int, ...]
    shortest_partial: int


class TurnOf(msgspec.Struct, array_like=True, frozen=True):
    name: SessionName
    turn: str


GET = Method("sessions.get", Get, Found)
REPLACE = Method("sessions.replace", Replace, Replaced)
MATCHES = Method("sessions.matches", Match, tuple[HistoryMatch, ...])
OPEN_TURN = Method("sessions.open_turn", TurnOf, type(None))
CLOSE_TURN = Method("sessions.close_turn", TurnOf, type(None))
DELETE = Method("sessions.delete", tuple[str, str], bool)
OF_TENANT = Method("sessions.of", str, tuple[SessionOverview, ...])
COUNT = Method("sessions.count", type(None), int)
