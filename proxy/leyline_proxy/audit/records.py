"""The records of the log, before they are chained. Pure; a record holds no text of a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

from leyline_engine.contract import Outcome, Receipt

from ..model.messages import Message, text_of
from .chain import AuditKey, key_id
from .check import torn_account
from .facts import EditFacts, TurnEdits

Record = Mapping[str, Any]
Status = Literal["settled", "refused", "abandoned"]

MAX_NAMES = 256
"""Names that a forget, or an edit, is told with; the record says how many more there were."""

MAX_CAUSE = 160


@dataclass(frozen=True, slots=True)
class TurnFacts:
    """One turn, as its record is made from it."""

    at: float
    """Seconds since the epoch."""
    status: Status
    tenant: str
    session: str
    turn: str
    index: int
    message_id: str
    model: str
    engine: str
    """Model and run of the engine; empty for one that has no name."""
    planned: Outcome
    receipt: Receipt | None
    """None where the engine gave none."""
    told: Receipt | None
    """What the caller was told; None where nobody was."""
    edits: TurnEdits
    forget: tuple[str, ...]
    owed: tuple[str, ...] = ()
    """Engines that still have to be told of a forget."""
    unreachable: bool = False
    """Whether what is to be forgotten may lie where no forget finds it."""


def turn_record(facts: TurnFacts, key: AuditKey | None) -> Record:
    """The record of a turn."""
    told, receipt = facts.told, facts.receipt
    record: dict[str, Any] = {
        **_stamp(facts.at, "turn"),
        "status": facts.status,
        "tenant": facts.tenant,
        "session": facts.session,
        "turn": facts.turn,
        "index": facts.index,
        "message_id": facts.message_id,
        "model": facts.model,
        "engine": facts.engine or None,
        "planned": facts.planned.value,
        "outcome": told.outcome.value if told is not None else None,
        "reason": told.reason.value if told is not None and told.reason is not None else None,
        "receipt": receipt is not None,
        "tokens": msgspec.to_builtins(told.tokens) if told is not None else None,
        "forgot": _forgot(receipt),
        "forget": list(facts.forget[:MAX_NAMES]),
        "edits": [_edit(edit, key) for edit in facts.edits.edits],
    }
    if facts.edits.omitted:
        record["edits_omitted"] = facts.edits.omitted
    if len(facts.forget) > MAX_NAMES:
        record["forget_omitted"] = len(facts.forget) - MAX_NAMES
    if facts.unreachable:
        record["unreachable"] = True
    if facts.owed:
        record["owed"] = list(facts.owed)
    return record


def receipt_record(facts: TurnFacts, receipt: Receipt | None, at: float) -> Record:
    """What a forget came to that was pending, or unknown, when its turn's record was written.

    Args:
        receipt: the last that is known; None when the engine has none.
    """
    return {
        **_stamp(at, "receipt"),
        "tenant": facts.tenant,
        "session": facts.session,
        "turn": facts.turn,
        "message_id": facts.message_id,
        "forgot": _forgot(receipt),
    }


def erasure_record(tenant: str, session: str, engine: str, result: str, at: float) -> Record:
    """A forget that was carried to another engine than the one that served its turn."""
    return {
        **_stamp(at, "erasure"),
        "tenant": tenant,
        "session": session,
        "engine": engine,
        "result": result,
    }


def claim_record(engine: str, event: Mapping[str, Any], at: float) -> Record:
    """An event of an engine's claims, as the engine numbered it."""
    return {**_stamp(at, "claim"), "engine": engine, "event": event}


def start_record(
    instance: str, version: str, key: AuditKey | None, at: float, missing: Record | None
) -> Record:
    """The log is opened.

    Args:
        missing: the head that the log is known to have had, where it ends before it.
    """
    record = {
        **_stamp(at, "start"),
        "instance": instance,
        "version": version,
        "key": key_id(key),
    }
    return record if missing is None else {**record, "missing": missing}


def rotate_record(
    before: Record, oldest: int, claims: Mapping[str, int], key: AuditKey | None, at: float
) -> Record:
    """The first record of a file that goes on from another one.

    Args:
        before: name of that file, and the last record in it.
        oldest: number of the oldest file that is kept.
        claims: the newest event of claims, by run of the engine.
    """
    return {
        **_stamp(at, "rotate"),
        "before": before,
        "oldest": oldest,
        "claims": claims,
        "key": key_id(key),
    }


def recovered_record(pieces: Sequence[bytes], *, opens: bool, at: float) -> Record:
    """The pieces of lines before this one are what a crash or a full disk left.

    Args:
        opens: whether no whole line stands before them in this file.
    """
    return {**_stamp(at, "recovered"), "torn": torn_account(pieces), "opens": opens}


def gap_record(lost: int, cause: str, at: float) -> Record:
    """So many records could not be written.

    Args:
        cause: ``queue`` or ``disk``.
    """
    return {**_stamp(at, "gap"), "lost": lost, "cause": cause}


def stop_record(at: float) -> Record:
    """The log was closed in order."""
    return _stamp(at, "stop")


def digest_of(message: Message, key: AuditKey) -> str:
    """The keyed hash of a message's text; of its tool calls, too, where it makes any."""
    text = text_of(message)
    calls = message.get("tool_calls")
    if calls:
        encoded = msgspec.json.encode(calls, order="sorted").decode()
        text = f"{text}\n{encoded}" if text else encoded
    return key.digest(text)


def _edit(edit: EditFacts, key: AuditKey | None) -> dict[str, Any]:
    told = edit.record
    span = told.span
    return {
        "message": told.message,
        "role": told.role[:32],
        "cause": told.cause[:MAX_CAUSE],
        "mode": told.mode,
        "removed_tokens": span[1] - span[0] if span is not None else None,
        "inserted_tokens": told.replacement_tokens if span is not None else None,
        "removed": _digests(edit.before, key),
        "inserted": _digests(edit.after, key),
        "sent_before": edit.sent_before,
        "names": list(edit.names[:MAX_NAMES]),
    }


def _digests(messages: Sequence[Message], key: AuditKey | None) -> list[str] | None:
    return None if key is None else [digest_of(message, key) for message in messages]


def _forgot(receipt: Receipt | None) -> dict[str, int] | None:
    if receipt is None or receipt.forgot is None:
        return None
    counts: dict[str, int] = msgspec.to_builtins(receipt.forgot)
    return counts


def _stamp(at: float, kind: str) -> dict[str, Any]:
    moment = datetime.fromtimestamp(at, UTC)
    return {"time": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"), "kind": kind}
