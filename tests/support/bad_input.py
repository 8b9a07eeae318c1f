"""Envelopes that lie or are broken: each a change to a good one, and why it is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from leyline_engine.contract import (
    CopySegment,
    Directive,
    EditPayload,
    LineageRun,
    LiteralSegment,
    Reason,
    SourceRef,
    SpanLabel,
    edit_envelope,
)

Envelope = dict[str, Any]
Change = Callable[[Envelope], Envelope]


def _payload(**members: Any) -> Change:
    """Exchanges members of the payload."""

    def change(envelope: Envelope) -> Envelope:
        [action] = envelope["actions"]
        payload = action["payload"] | msgspec.to_builtins(members)
        return envelope | {"actions": [action | {"payload": payload}]}

    return change


def _action(**members: Any) -> Change:
    """Exchanges members of the action."""
    return lambda envelope: envelope | {"actions": [envelope["actions"][0] | members]}


def _envelope(**members: Any) -> Change:
    """Exchanges members of the envelope."""
    return lambda envelope: envelope | members


def _directives(*directives: Directive) -> Change:
    return _payload(directives=directives)


def _source(**members: Any) -> Change:
    """Exchanges members of the only source."""

    def change(envelope: Envelope) -> Envelope:
        [source] = envelope["actions"][0]["payload"]["sources"]
        return _payload(sources=[source | members])(envelope)

    return change


def _replacing(*tokens: int) -> Change:
    """Claims that the first cut was replaced by other tokens than the prompt has."""
    return _directives(Directive(40, 60, tokens), Directive(80, 90))


BAD: dict[str, tuple[Change, Reason]] = {
    "out of order": (
        _directives(Directive(80, 90), Directive(40, 60)),
        Reason.INVALID_DIRECTIVE,
    ),
    "overlapping": (
        _directives(Directive(40, 60), Directive(59, 90)),
        Reason.INVALID_DIRECTIVE,
    ),
    "out of range": (_directives(Directive(40, 10_000)), Reason.INVALID_DIRECTIVE),
    "far out of range": (_directives(Directive(2**62, 2**62 + 1)), Reason.INVALID_DIRECTIVE),
    "beyond 64 bits": (_directives(Directive(2**63, 2**63 + 1)), Reason.INVALID_DIRECTIVE),
    "negative": (_directives(Directive(-5, 3)), Reason.INVALID_DIRECTIVE),
    "reversed": (_directives(Directive(60, 40)), Reason.INVALID_DIRECTIVE),
    "of no source": (_directives(Directive(40, 60, source=3)), Reason.INVALID_DIRECTIVE),
    "ten thousand": (
        _directives(*(Directive(i, i) for i in range(10_000))),
        Reason.INVALID_DIRECTIVE,
    ),
    "of another form": (_payload(directives=[{"start": "40"}]), Reason.INVALID_DIRECTIVE),
    "unknown mode": (
        _payload(directives=[{"start": 40, "end": 60, "mode": "maybe"}]),
        Reason.INVALID_DIRECTIVE,
    ),
    "unknown session": (_payload(session="nobody"), Reason.MISSING_SOURCE),
    "another tenant": (_payload(scope="somebody else"), Reason.MISSING_SOURCE),
    "unknown turn": (_source(turn="t9"), Reason.MISSING_SOURCE),
    "lying digest": (_source(digest="0" * 16), Reason.TOKEN_MISMATCH),
    "lying length": (_source(length=3), Reason.TOKEN_MISMATCH),
    "replacement that the prompt lacks": (_replacing(1, 2, 3), Reason.TOKEN_MISMATCH),
    "replacement beyond 64 bits": (_replacing(2**70, 2**70), Reason.INVALID_DIRECTIVE),
    "segments that leave a gap": (
        _payload(segments=(CopySegment(0, 0, 40, 0), LiteralSegment(50, 5))),
        Reason.INVALID_EDIT,
    ),
    "segment of no source": (_payload(segments=(CopySegment(7, 0, 40, 0),)), Reason.INVALID_EDIT),
    "endless segment": (_payload(segments=(LiteralSegment(0, 2**62),)), Reason.TOKEN_MISMATCH),
    "segment beyond 64 bits": (
        _payload(segments=(LiteralSegment(0, 2**70),)),
        Reason.INVALID_EDIT,
    ),
    "unsorted lineage": (
        _payload(lineage=(LineageRun(60, "b"), LineageRun(40, "a"))),
        Reason.INVALID_EDIT,
    ),
    "span beyond the prompt": (_payload(spans=(SpanLabel("m", 0, 10_000),)), Reason.INVALID_EDIT),
    "no payload": (_action(payload={}), Reason.INVALID_EDIT),
    "no session": (_payload(session=""), Reason.INVALID_EDIT),
    "two edits": (
        lambda envelope: envelope | {"actions": envelope["actions"] * 2},
        Reason.INVALID_EDIT,
    ),
    "a thousand actions": (
        lambda envelope: envelope | {"actions": envelope["actions"] * 1000},
        Reason.INVALID_EDIT,
    ),
    "a huge envelope": (_envelope(signature="x" * (5 << 20)), Reason.INVALID_EDIT),
    "no version": (_envelope(protocol_version=None), Reason.INVALID_EDIT),
}
"""By name: what is done to a good envelope, and why the engine refuses the result."""

HARMLESS: dict[str, Change] = {
    "ids beyond the vocabulary": _replacing(10**6, 10**6),
    "ids beyond a folded key": _replacing(2**24, 2**24 + 1),
    "ids beyond a key": _replacing(2**63, 2**64 - 1),
    "negative ids": _replacing(-1, -(2**63)),
}
"""Replacement ids that no prompt can have. The engine goes by the prompt: of a replacement only
its length counts, so these are spliced as the good one is."""

SKIPPED: dict[str, Change] = {
    "newer protocol": _envelope(protocol_version="9.0"),
    "unknown action": _action(action_type="leyline.levitate"),
    "newer action": _action(action_version="2.0"),
}
"""Not understood, hence reported and not acted on."""


def good_envelope(name: str, payload: EditPayload) -> Envelope:
    """The envelope that the changes are made to."""
    envelope: Envelope = msgspec.to_builtins(edit_envelope(name, payload))
    return envelope


def good_payload(session: str, source: SourceRef, turn: str) -> EditPayload:
    """Two cuts, the first with a replacement of two tokens."""
    return EditPayload(
        session=session,
        scope="bad input",
        turn=turn,
        sources=(source,),
        directives=(Directive(40, 60, (7, 8)), Directive(80, 90)),
    )
