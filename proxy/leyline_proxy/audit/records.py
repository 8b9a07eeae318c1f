"""The records of the log before chaining. Pure; a record holds no prompt text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

from leyline_engine.contract import Outcome, Receipt

from ..model.derived import Derived
from ..model.messages import Message, text_of
from ..model.verdicts import Verdict
from .chain import AuditKey, key_id
from .check import torn_account
from .facts import EditFacts, TurnEdits

Record = Mapping[str, Any]
Status = Literal["settled", "refused", "abandoned"]

MAX_NAMES = 256
"""Largest number of names in the record of a forget or an edit, which counts the others."""

MAX_CAUSE = 160


@dataclass(frozen=True, slots=True)
class TurnFacts:
    """The facts of one turn for its record."""

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
    """Model and run of the engine; empty for one without a name."""
    planned: Outcome
    receipt: Receipt | None
    """None if the engine gave none."""
    told: Receipt | None
    """The caller's receipt; None if the caller got none."""
    edits: TurnEdits
    forget: tuple[str, ...]
    owed: tuple[str, ...] = ()
    """Engines that still have to receive a forget."""
    unreachable: bool = False
    """True if text to forget may be in a place that no forget finds."""
    derived: Derived | None = None
    """Texts that are derived from what was forgotten; None if nothing was."""


def turn_record(facts: TurnFacts, key: AuditKey | None) -> Record:
    """Return the record of a turn."""
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
    if facts.derived is not None:
        record |= facts.derived.account()
    if facts.unreachable:
        record["unreachable"] = True
    if facts.owed:
        record["owed"] = list(facts.owed)
    return record


def receipt_record(facts: TurnFacts, receipt: Receipt | None, at: float) -> Record:
    """Return the result of a forget that was pending or unknown in its turn's record.

    Args:
        receipt: the last known one; None if the engine has none.
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
    """Return the record of a forget carried to another engine than the one that served its turn."""
    return {
        **_stamp(at, "erasure"),
        "tenant": tenant,
        "session": session,
        "engine": engine,
        "result": result,
    }


def quarantine_record(
    owner: tuple[str, str],
    verdict: Verdict,
    at: float,
    *,
    receipt: Receipt | None = None,
    reason: str | None = None,
    owed: Sequence[str] = (),
    derived: Derived | None = None,
) -> Record:
    """Return the record of a message that was put into quarantine.

    Args:
        owner: tenant and session.
        receipt: of the turn that brought the verdict; None without one.
        reason: a word from a list, as the caller gave it.
        owed: engines that still have to forget.
        derived: texts that are derived from all messages of the demand, in its first record.
    """
    return {
        **_stamp(at, "quarantine"),
        "tenant": owner[0],
        "session": owner[1],
        "span": verdict.span,
        "by": verdict.by,
        "cause": verdict.cause[:MAX_CAUSE],
        "reason": reason,
        "message": verdict.message,
        "role": verdict.role[:32],
        "turn": verdict.turn or None,
        "forgot": _forgot(receipt),
        "owed": list(owed),
        **(derived.account() if derived is not None else {}),
    }


def proof_record(proof: Mapping[str, Any], at: float) -> Record:
    """Return the record of a forget with a proof, which has no text."""
    return {**_stamp(at, "proof"), **{k: v for k, v in proof.items() if k not in ("time", "stays")}}


def claim_record(engine: str, event: Mapping[str, Any], at: float) -> Record:
    """Return the record of an engine's claim event, with the engine's number."""
    return {**_stamp(at, "claim"), "engine": engine, "event": event}


def start_record(
    instance: str, version: str, key: AuditKey | None, at: float, missing: Record | None
) -> Record:
    """Return the record of the log's opening.

    Args:
        missing: the last known head of a log that ends before it.
    """
    record = {**_stamp(at, "start"), "instance": instance, "version": version, "key": key_id(key)}
    return record if missing is None else {**record, "missing": missing}


def rotate_record(
    before: Record, oldest: int, claims: Mapping[str, int], key: AuditKey | None, at: float
) -> Record:
    """Return the first record of a file that continues another one.

    Args:
        before: name of that file, and its last record.
        oldest: number of the oldest file kept.
        claims: the newest claim event, by run of the engine.
    """
    return {
        **_stamp(at, "rotate"),
        "before": before,
        "oldest": oldest,
        "claims": claims,
        "key": key_id(key),
    }


def recovered_record(pieces: Sequence[bytes], *, opens: bool, at: float) -> Record:
    """Return the record of pieces of lines that a crash or a full disk left before it.

    Args:
        opens: True if no whole line comes before them in this file.
    """
    return {**_stamp(at, "recovered"), "torn": torn_account(pieces), "opens": opens}


def gap_record(lost: int, cause: str, at: float) -> Record:
    """Return the record of a number of records that could not be written.

    Args:
        cause: ``queue`` or ``disk``.
    """
    return {**_stamp(at, "gap"), "lost": lost, "cause": cause}


def lost_record(turns: Sequence[Record], at: float) -> Record:
    """Return the record of turns that were under way at a process which died.

    Args:
        turns: their ``message_id``, ``tenant``, ``session`` and ``turn``.
    """
    record = {**gap_record(len(turns), "worker", at), "turns": [*turns[:MAX_NAMES]]}
    return (
        record if len(turns) <= MAX_NAMES else {**record, "turns_omitted": len(turns) - MAX_NAMES}
    )


def stop_record(at: float) -> Record:
    """Return the record of an orderly close."""
    return _stamp(at, "stop")


def digest_of(message: Message, key: AuditKey) -> str:
    """Return the keyed hash of a message's text and of its tool calls, if any."""
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
