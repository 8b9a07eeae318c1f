"""The questions and answers about sessions between workers and hub."""

from __future__ import annotations

import msgspec

from ..model.history import HistoryMatch
from ..sessions.pieces import Pieces
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
    pieces: Pieces | None = None
    """None if the worker has that version."""
    open_turns: frozenset[str] = frozenset()


class Replace(msgspec.Struct, array_like=True, frozen=True):
    name: SessionName
    read: bytes
    """The version that was read; empty for none."""
    key: str
    new: Pieces
    """Pieces that the hub doesn't have; all in their order."""
    gone: tuple[int, ...]
    """Numbers of messages that it needs no more."""
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


class Matched(msgspec.Struct, array_like=True, frozen=True):
    """Sessions, and the version of the one whose whole history is continued: the last."""

    matches: tuple[HistoryMatch, ...]
    whole: Found | None = None


class TurnOf(msgspec.Struct, array_like=True, frozen=True):
    name: SessionName
    turn: str


GET = Method("sessions.get", Get, Found)
REPLACE = Method("sessions.replace", Replace, Replaced)
MATCHES = Method("sessions.matches", Match, Matched)
OPEN_TURN = Method("sessions.open_turn", TurnOf, type(None))
CLOSE_TURN = Method("sessions.close_turn", TurnOf, type(None))
DELETE = Method("sessions.delete", tuple[str, str], bool)
OF_TENANT = Method("sessions.of", str, tuple[SessionOverview, ...])
COUNT = Method("sessions.count", type(None), int)
