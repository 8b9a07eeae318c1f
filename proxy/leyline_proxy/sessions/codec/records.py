"""What a stored session consists of. A change of these is a new format; see :mod:`.format`.

What turns share stands once, in tables; turns refer to it by place. A list that begins like that of
the newest turn holds only what differs behind it.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from leyline_engine.contract import LineageRun, Outcome, Reason, Receipt
from leyline_policies import Note

from ...model.prepared import Change, ForgetMark, PolicyFault
from ...model.session import Departed, EditRecord, Place


class Shared(msgspec.Struct, array_like=True, frozen=True):
    """Places in a table: the first ``common`` of the newest turn's, then ``rest``."""

    common: int
    rest: bytes
    """32-bit integers."""


class Tokens(msgspec.Struct, array_like=True, frozen=True):
    """Token ids: the first ``common`` of the newest turn's, then ``rest``."""

    common: int
    width: int
    """Bytes of an id in ``rest``: 4, or 8 where an id needs them."""
    rest: bytes


class Wanted(msgspec.Struct, array_like=True, frozen=True):
    """A :class:`~leyline_policies.context.Completion`."""

    key: str
    messages: tuple[int, ...]
    model: str
    max_tokens: int


class StoredTurn(msgspec.Struct, array_like=True, frozen=True):
    """A :class:`~leyline_proxy.model.session.RetainedTurn`."""

    turn: str
    index: int
    tokens: Tokens
    spans: bytes
    """Three 32-bit integers each."""
    context: str
    output_ids: Tokens
    lineage: tuple[LineageRun, ...]
    receipt: int
    digest: str
    model_fingerprint: str
    weight: int
    client_names: Shared
    sent_names: Shared
    client: Shared
    sent: Shared
    dropped: tuple[tuple[int, Change], ...]
    faults: tuple[PolicyFault, ...]
    forget_marks: dict[int, ForgetMark]
    notes: tuple[Note, ...]
    states: int
    wanted: tuple[Wanted, ...]
    scope: str | None
    pins: int
    used: tuple[str, ...]
    replica: str
    model: str


class StoredSent(msgspec.Struct, array_like=True, frozen=True):
    """A :class:`~leyline_proxy.model.prepared.SentMessage`."""

    message: int
    client_index: int | None
    changes: tuple[Change, ...]
    moved_from: int | None


class StoredSummary(msgspec.Struct, array_like=True, frozen=True):
    """A :class:`~leyline_proxy.model.session.TurnSummary`."""

    index: int
    turn: str
    created: float
    planned: Outcome
    reason: Reason | None
    edits: tuple[EditRecord, ...]
    receipt: int


class StoredSession(msgspec.Struct, array_like=True, frozen=True):
    """A :class:`~leyline_proxy.model.session.Session` and its tables."""

    id: str
    tenant: str
    key: str
    next_index: int
    updated: float
    created: float
    unnamed: int
    unvouched: bool
    demands: int
    untraced: int
    places: Mapping[str, Place]
    departed: Departed
    policy_states: int
    completions: Mapping[str, str]
    history: tuple[StoredSummary, ...]
    turns: tuple[StoredTurn, ...]
    """Newest first."""
    messages: list[bytes]
    """JSON."""
    fingerprints: bytes
    """Of the messages, 64 bits each."""
    sent: list[StoredSent]
    values: list[bytes]
    """JSON: what policies left, what is said of pinned messages."""
    receipts: list[Receipt]
    names: list[tuple[str, tuple[str, ...]]]
    labels: list[tuple[str, ...]]


NONE = -1
"""Place of what isn't there."""
