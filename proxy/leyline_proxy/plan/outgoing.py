"""The body that goes upstream: the client's bytes, changed only where necessary."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from leyline_engine.contract import (
    CARRIED,
    MAX_RETIRED,
    METADATA,
    EditPayload,
    Envelope,
    Extent,
    RecurrentEdits,
    ReuseMode,
    ReusePayload,
    SourceRef,
    edit_envelope,
    packed,
    restriction,
    sealed_digest,
    sign_envelope,
)

from ..edits.rules import effective_share
from ..model.fields import BEGUN_ANSWER, CONTINUE_MEMBER, OPTIONS_FIELD
from ..model.prepared import Prepared
from ..request.context_management import CONTEXT_FIELD
from ..request.parse import ChatRequest
from ..request.prewarm import for_one_token
from ..request.values import decode
from ..request.wire import RESERVED, add_members, remove_members, replace_messages, split_body
from ..settings.cache_scope import MEMBER
from .named import NamedCopies
from .plan_input import PlanInput
from .planning import Planned, sink_of
from .recalled import recalled_extents
from .synthesis import TurnPlan

PROXY_MEMBERS = (*RESERVED, OPTIONS_FIELD, CONTEXT_FIELD)
"""Members of a body that belong to the proxy and don't go upstream as a client sent them."""

_CHANGED = frozenset((*PROXY_MEMBERS, METADATA))
_PARAMS = "custom_params"
_CARRIED = CARRIED.encode()


def without_reserved(raw: bytes, members: Iterable[str] | None = None) -> bytes:
    """Return the body without members that only the proxy may set, and without its own options.

    Args:
        members: names of all members, if they are known: most bodies are returned as they are.
    """
    if members is not None and _CHANGED.isdisjoint(members):
        return raw
    body = remove_members(raw, PROXY_MEMBERS)
    # Only an escape can hide the name from a search of the bytes.
    if _CARRIED not in body and b"\\u" not in body:
        return body
    metadata = _metadata(body)
    if CARRIED not in metadata:
        return body
    kept = {name: value for name, value in metadata.items() if name != CARRIED}
    return _with_metadata(body, msgspec.json.encode(kept))


def _metadata(body: bytes) -> dict[str, Any]:
    """Return a body's metadata; nothing if it has none, or something else under this name."""
    try:
        found = decode(bytes(split_body(body)[METADATA]))
    except (KeyError, msgspec.DecodeError, UnicodeDecodeError):
        return {}
    return found if isinstance(found, dict) else {}


def edit_payload(
    request: ChatRequest,
    session_id: str,
    name: str,
    plan: TurnPlan,
    sink: int,
    *,
    scope: str | None = None,
    secret: str | None = None,
    recurrent: RecurrentEdits | None = None,
) -> EditPayload:
    """Return this turn's payload for the engine; without directives it only registers the turn.

    Args:
        scope: scope to share with, as named by messages.
        secret: shared with the engine; digests of prompt text are sealed with it.
        recurrent: the promise about recurrent states, None if there are none. If it is exact, the
            turn takes part in no scope: others' splices bring theirs.
    """
    return EditPayload(
        session=session_id,
        scope=request.tenant.name,
        turn=name,
        sources=_sealed(plan.sources, secret),
        directives=plan.directives,
        segments=plan.segments,
        lineage=plan.lineage,
        spans=plan.spans,
        forget=plan.forget,
        retire=plan.retire[-MAX_RETIRED:],
        share="" if recurrent is RecurrentEdits.EXACT else effective_share(request, scope),
        sink=sink,
        recurrent=recurrent or RecurrentEdits.EXACT,
    )


def asks_for_reuse(given: PlanInput) -> bool:
    """Return True if the engine is asked for reuse."""
    capability = given.status.capability
    wanted = reuse_mode(given.request) != "off"
    return wanted and given.status.splices and capability is not None and capability.reuses


def asks_for_recalls(given: PlanInput) -> bool:
    """Return True if the engine is asked for KV of recalled texts alone."""
    only = given.request.tenant.recall and reuse_mode(given.request) == "off"
    return only and given.status.reuses_within


def reuse_payload(
    given: PlanInput,
    named: NamedCopies,
    *,
    secret: str | None = None,
    recalled: Sequence[Extent] | None = None,
) -> ReusePayload | None:
    """Return the request for reuse; None if it is off, or if the engine can't.

    Args:
        named: places of content, for the engine to check.
        secret: shared with the engine; digests of prompt text are sealed with it.
        recalled: extents of the prompt whose text an earlier edit took out. If reuse is off, they
            alone are copied, from the session's own turns; with none, the turn is only indexed.
    """
    general = asks_for_reuse(given)
    only_recalls = reuse_mode(given.request) == "off" and given.status.reuses_within
    if not general and (recalled is None or not only_recalls):
        return None
    options, tenant = given.request.options, given.request.tenant
    groups = tenant.reuse_groups if options.reuse_groups is None else options.reuse_groups
    return ReusePayload(
        mode=ReuseMode(reuse_mode(given.request)) if general else ReuseMode.LIVE,
        boundary=options.boundary or 0,
        groups=groups if general else (),
        margin=tenant.reuse_margin if options.reuse_margin is None else options.reuse_margin,
        sources=_sealed(named.sources, secret),
        copies=named.copies,
        within=None if general else restriction(recalled or ()),
        own=not general,
    )


def reuse_mode(request: ChatRequest) -> str:
    """Return the request's own choice, or else its tenant's."""
    return request.tenant.reuse if request.options.reuse is None else request.options.reuse


def _sealed(sources: Iterable[SourceRef], secret: str | None) -> tuple[SourceRef, ...]:
    """Return sources as they leave the process."""
    return tuple(
        msgspec.structs.replace(source, digest=sealed_digest(source.digest, secret))
        for source in sources
    )


def turn_envelope(
    given: PlanInput,
    planned: Planned,
    session_id: str,
    message_id: str,
    *,
    named: NamedCopies,
    secret: str | None,
) -> Envelope | None:
    """Return a turn's envelope for the engine; None for an engine that takes no envelopes.

    Args:
        named: places of content in other sessions, if reuse is asked for.
        secret: shared with the engine, which ignores envelopes that aren't signed with it.
    """
    capability = given.status.capability
    if capability is None:
        return None
    payload = edit_payload(
        given.request,
        session_id,
        given.turn,
        planned.plan,
        sink_of(given.status),
        scope=planned.prepared.scope,
        secret=secret,
        recurrent=given.recurrent,
    )
    # KV of a text that was put back is copied even if its tenant reuses nothing else.
    recalled = recalled_extents(planned) if given.request.tenant.recall else None
    envelope = edit_envelope(
        message_id,
        payload,
        reuse=reuse_payload(given, named, secret=secret, recalled=recalled),
        receipt_in_answer=capability.receipt_in_answer,
    )
    return envelope if secret is None else sign_envelope(envelope, secret)


def outgoing_body(
    request: ChatRequest,
    prepared: Prepared,
    envelope: Envelope | None,
    salt: str | None = None,
    *,
    carried: bool = False,
) -> bytes:
    """Return the body for the engine.

    If no message was changed, it is the client's byte for byte, less reserved members and plus the
    envelope; otherwise every unchanged message still keeps its bytes.

    Args:
        salt: of the tenant's cache scope.
        carried: True if the proxy's members have to survive a router.
    """
    body = without_reserved(request.raw, request.body)
    messages = [(sent.client_index, sent.message) for sent in prepared.sent]
    body = replace_messages(body, messages, prepared.client)
    if request.prewarms:
        body = for_one_token(body, request.body)
    # What is put after the beginning of an answer ends that.
    if request.body.get(CONTINUE_MEMBER) and prepared.messages[-1].get("role") != "assistant":
        body = remove_members(body, tuple(BEGUN_ANSWER))
    if carried:
        return _carrying(body, envelope, salt)
    body = salted(body, salt)
    if envelope is None:
        return body
    return add_members(body, {_PARAMS: msgspec.json.encode({"kv_hints": envelope})})


def _carrying(body: bytes, envelope: Envelope | None, salt: str | None) -> bytes:
    """Return a body whose metadata carries the proxy's members."""
    members: dict[str, msgspec.Raw] = {}
    if salt is not None:
        members[MEMBER] = msgspec.Raw(msgspec.json.encode(salt))
    if envelope is not None:
        members[_PARAMS] = msgspec.Raw(msgspec.json.encode({"kv_hints": envelope}))
    if not members:
        return body
    return _with_metadata(body, packed(members, _metadata(body)))


def _with_metadata(body: bytes, metadata: bytes) -> bytes:
    return add_members(remove_members(body, (METADATA,)), {METADATA: metadata})


def salted(body: bytes, salt: str | None) -> bytes:
    """Return the body of a request, in a cache scope."""
    return body if salt is None else add_members(body, {MEMBER: msgspec.json.encode(salt)})
