"""The ``kv_hints`` envelope and the payload of ``leyline.edit@1.0``."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec

from . import vocabulary
from .directive import Directive, Segment
from .proof import ProvePayload
from .reuse import ReusePayload
from .source import Identifier, Position, SourceRef
from .vocabulary import (
    ACTION_VERSION,
    ATTENTION_SINK,
    EDIT_ACTION,
    PROTOCOL_VERSION,
    PROVE_ACTION,
    RECEIPT_ACTION,
    REUSE_ACTION,
    RecurrentEdits,
)

MAX_ACTIONS = 64
MAX_SPANS = 16_384
MAX_FORGOTTEN = 4_096
MAX_RETIRED = 64


class EnvelopeError(ValueError):
    """An envelope or payload that doesn't follow the contract; the message names the field."""


class LineageRun(msgspec.Struct, frozen=True):
    """From position ``start`` on (to the next run), keys are private to ``lineage``."""

    start: Position
    lineage: Identifier


class SpanLabel(msgspec.Struct, frozen=True):
    """Tokens ``[start, end)`` of the prompt belong to span ``span`` of the session's ledger.

    A span is usually a message. Its name stays with it from turn to turn, whatever an edit makes of
    its text, and is never given to another. Labels may overlap if it isn't certain which span a
    token belongs to; the engine labels its own output as :func:`output_span`.
    """

    span: Identifier
    start: Position
    end: Position


def output_span(turn: str) -> str:
    """Return the ledger's name for the engine's output in ``turn``."""
    return f"{turn}.out"


class EditPayload(msgspec.Struct, frozen=True, kw_only=True):
    """The edit of one turn. With no directives it only registers the turn.

    ``segments`` cover the new prompt in order; the engine checks each copy against its own
    record of the source and against the prompt, and applies all of them or none. Without
    segments, the directives of a single source are lowered by the engine. Tokens that a
    boundary recompute leaves out of the copies are literals.
    """

    session: Identifier
    scope: Identifier
    """Tenant scope; lineages and sources are never shared across scopes."""
    turn: Identifier
    """Name under which this turn's tokens are retained as a source for later turns."""
    sources: tuple[SourceRef, ...] = ()
    directives: tuple[Directive, ...] = ()
    segments: tuple[Segment, ...] = ()
    lineage: tuple[LineageRun, ...] = ()
    """The lineage map of the conversation so far; empty if nothing was ever spliced."""
    spans: Annotated[tuple[SpanLabel, ...], msgspec.Meta(max_length=MAX_SPANS)] = ()
    """Labels of the parts of this prompt, sorted by start. Tokens without a label can only be
    forgotten with all else that the session holds."""
    forget: Annotated[tuple[Identifier, ...], msgspec.Meta(max_length=MAX_FORGOTTEN)] = ()
    """Spans of which no reader may survive, in any place or version in which the session held them.
    A name that the engine's ledger lacks means all that the session published."""
    retire: Annotated[tuple[Identifier, ...], msgspec.Meta(max_length=MAX_RETIRED)] = ()
    """Turns of the session that none will continue, as after a compaction. Once this turn is
    retained, they are sources no more, and KV that only they have is freed."""
    share: Annotated[str, msgspec.Meta(max_length=256)] = ""
    """Scope within the tenant that may see what this turn splices; by default nobody else may."""
    sink: Annotated[int, msgspec.Meta(ge=0)] = ATTENTION_SINK
    """Destinations below this are prefilled; the engine never goes below its own sink."""
    recurrent: RecurrentEdits = RecurrentEdits.EXACT
    """The promise about recurrent states; engines without any ignore it. Nobody gets a kept state
    without having asked for it."""


class Action(msgspec.Struct, frozen=True):
    """One action of an envelope; its payload is decoded by type and version."""

    action_id: Identifier
    action_type: Identifier
    action_version: Identifier
    payload: dict[str, Any] = {}


class Envelope(msgspec.Struct, frozen=True):
    """The hints of one request."""

    protocol_version: str
    message_id: Identifier
    actions: Annotated[tuple[Action, ...], msgspec.Meta(max_length=MAX_ACTIONS)] = ()
    signature: str = ""
    """The signature of :mod:`.signing`; empty if proxy and engine share no secret."""


class SkippedAction(msgspec.Struct, frozen=True):
    """An action that the engine doesn't know; reported, never guessed."""

    action_id: str
    action_type: str
    action_version: str


_PayloadT = TypeVar("_PayloadT", EditPayload, ReusePayload, ProvePayload)


class Actions(NamedTuple):
    """The known actions of an envelope."""

    edit: EditPayload | None = None
    reuse: ReusePayload | None = None
    skipped: tuple[SkippedAction, ...] = ()
    prove: ProvePayload | None = None


def edit_envelope(
    message_id: str,
    payload: EditPayload,
    *,
    reuse: ReusePayload | None = None,
    prove: ProvePayload | None = None,
    receipt_in_answer: bool = False,
) -> Envelope:
    """Wrap one edit payload into an envelope.

    Args:
        reuse: the request for reuse, of an engine that supports it.
        prove: the demand for a proof of what the payload forgets.
        receipt_in_answer: ask for the record in the answer, of an engine that supports it.
    """
    actions = [
        Action(
            action_id=f"{message_id}.edit",
            action_type=EDIT_ACTION,
            action_version=ACTION_VERSION,
            payload=msgspec.to_builtins(payload),
        )
    ]
    if reuse is not None:
        asked = msgspec.to_builtins(reuse)
        actions.append(Action(f"{message_id}.reuse", REUSE_ACTION, ACTION_VERSION, asked))
    if prove is not None:
        asked = msgspec.to_builtins(prove)
        actions.append(Action(f"{message_id}.prove", PROVE_ACTION, ACTION_VERSION, asked))
    if receipt_in_answer:
        actions.append(Action(f"{message_id}.receipt", RECEIPT_ACTION, ACTION_VERSION))
    return Envelope(PROTOCOL_VERSION, message_id, tuple(actions))


def parse_envelope(raw: object) -> Envelope:
    """Decode an envelope from JSON-shaped data.

    Raises:
        EnvelopeError: names the field that is missing or of the wrong type.
    """
    try:
        return msgspec.convert(raw, Envelope)
    except msgspec.ValidationError as error:
        raise EnvelopeError(f"kv_hints: {error}") from error


def split_actions(envelope: Envelope) -> Actions:
    """Return the payloads of an envelope's known actions, and the others as skipped.

    Raises:
        EnvelopeError: a payload is malformed, or there are two of one kind.
    """
    edits: list[EditPayload] = []
    reuses: list[ReusePayload] = []
    proves: list[ProvePayload] = []
    skipped: list[SkippedAction] = []
    supported_protocol = envelope.protocol_version == PROTOCOL_VERSION
    for action in envelope.actions:
        known = supported_protocol and action.action_version == ACTION_VERSION
        match action.action_type if known else "":
            case vocabulary.EDIT_ACTION:
                edits.append(_payload(action, EditPayload))
            case vocabulary.REUSE_ACTION:
                reuses.append(_payload(action, ReusePayload))
            case vocabulary.PROVE_ACTION:
                proves.append(_payload(action, ProvePayload))
            case vocabulary.RECEIPT_ACTION:
                pass  # the code that answers handles it
            case _:
                skipped.append(
                    SkippedAction(action.action_id, action.action_type, action.action_version)
                )
    ours = ((EDIT_ACTION, edits), (REUSE_ACTION, reuses), (PROVE_ACTION, proves))
    for kind, found in ours:
        if len(found) > 1:
            raise EnvelopeError(f"kv_hints: more than one {kind} action in one request")
    return Actions(
        edits[0] if edits else None,
        reuses[0] if reuses else None,
        tuple(skipped),
        proves[0] if proves else None,
    )


def _payload(action: Action, kind: type[_PayloadT]) -> _PayloadT:
    try:
        return msgspec.convert(action.payload, kind)
    except msgspec.ValidationError as error:
        raise EnvelopeError(f"kv_hints action {action.action_id!r}: {error}") from error
