"""Turn the client's messages into the messages to send, with the cause of each change.

Declared edits come first, all or none, because they refer to the client's own text. Then the
policies run, in order. A policy that raises or returns nonsense is skipped as a whole, and the turn
continues without it; if that policy forgets, nothing may be sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from leyline_policies import Memo, Policy
from leyline_policies.verbs import is_annotated, pin_of, scopes_of, unannotated

from ..model.messages import Message, fingerprint
from ..model.prepared import Fingerprinted, Prepared, Quarantined, SentMessage
from ..request.declared import DeclaredEdit, apply_declared
from .erratum import add_errata
from .running import SAYS, Limit, PolicyRun, PolicySession, PolicyTimeoutError
from .stage import Stage, client_stage, declared_demands, find_fault

__all__ = ["Limit", "PolicySession", "PolicyTimeoutError", "prepare", "unedited"]

_PRINT = "fingerprint"


def prepare(
    client: Sequence[Message],
    policies: Sequence[Policy],
    declared: Sequence[DeclaredEdit],
    turn_index: int,
    *,
    fingerprints: Sequence[int] | None = None,
    session: PolicySession | None = None,
    condemned: Mapping[int, Quarantined] | None = None,
    erratum: str = "",
) -> Prepared:
    """Run declared edits and policies over the client's messages. Policies' faults never raise; a
    fault of a policy that forgets refuses the result.

    Policies that forget run first, on the client's own messages, so that no other policy can hide
    content from them. They run again in their place if others changed something.

    Args:
        fingerprints: the client's messages' fingerprints, if known.
        session: without it, policies know of no earlier turn.
        condemned: the client's messages that are in quarantine already.
        erratum: note at the end of each message that a policy shortened.

    Raises:
        DeclaredEditError: a declared edit can't be applied; see :func:`check_declared`.
    """
    session = session or PolicySession()
    memo, client = session.memo, tuple(client)
    untouched = client_stage(client, memo)
    stage = _declared(untouched, declared) if declared else untouched
    runner = PolicyRun(session, turn_index, checked=False, condemned=condemned)
    done = runner.run_all(stage, policies, untouched)
    is_changed = done.refused is None and done.messages is not stage.messages
    if is_changed and find_fault(stage.messages, done.messages, memo):
        # A trusted policy broke the rules: find out which, and leave it out.
        runner = PolicyRun(session, turn_index, checked=True, condemned=condemned)
        done = runner.run_all(stage, policies, untouched)
    done = add_errata(done, client, erratum, memo)
    done, scopes, pins = _read_annotations(done, memo)
    return Prepared(
        client,
        done.sent,
        done.dropped,
        tuple(dict.fromkeys(done.faults)),
        done.demands,
        tuple(runner.notes),
        # Without policies, their earlier states are kept.
        runner.states if policies else {**session.states, **runner.states},
        tuple(runner.wanted),
        next(iter(scopes)) if len(scopes) == 1 else None,
        pins,
        frozenset(runner.used),
        done.refused,
        runner.quarantined,
        _fingerprinted(client, fingerprints, done, memo),
    )


def unedited(client: tuple[Message, ...], fingerprints: Sequence[int]) -> Prepared:
    """Return the result of :func:`prepare` for messages without edits and annotations.

    Args:
        fingerprints: the messages' fingerprints.
    """
    sent, prints = tuple(map(SentMessage, client, range(len(client)))), tuple(fingerprints)
    known = Fingerprinted(client, prints), Fingerprinted(sent, prints)
    return Prepared(client, sent, known_fingerprints=known)


def _declared(untouched: Stage, declared: Sequence[DeclaredEdit]) -> Stage:
    sent, dropped = apply_declared(untouched.sent, declared)
    return replace(untouched, sent=sent, dropped=dropped, demands=declared_demands(sent, dropped))


def _read_annotations(
    done: Stage, memo: Memo
) -> tuple[Stage, frozenset[str], dict[int, Mapping[str, Any]]]:
    """Return the list as the engine may see it, and the scopes and pins that its messages name."""
    if not memo.any(done.messages, SAYS, is_annotated, "sent"):
        return done, frozenset(), {}
    scopes, pins = scopes_of(done.messages), _pins_of(done.sent)
    return replace(done, sent=tuple(map(_unannotated, done.sent))), scopes, pins


def _pins_of(sent: Sequence[SentMessage]) -> dict[int, Mapping[str, Any]]:
    """Return the terms of messages whose KV stays, by index in the client's list."""
    said = ((entry.client_index, pin_of(entry.message)) for entry in sent)
    return {index: terms for index, terms in said if index is not None and terms is not None}


def _fingerprinted(
    client: tuple[Message, ...], fingerprints: Sequence[int] | None, done: Stage, memo: Memo
) -> tuple[Fingerprinted, ...]:
    """Return both lists with fingerprints; those of edited messages are computed only once."""
    if fingerprints is None:
        fingerprints = memo.map(client, _PRINT, fingerprint)
    prints = tuple(fingerprints)

    def of_entry(entry: SentMessage) -> int:
        place = entry.client_index
        is_own = place is not None and entry.message is client[place]
        return prints[place] if is_own and place is not None else fingerprint(entry.message)

    sent = tuple(memo.map(done.sent, _PRINT, of_entry, "sent"))
    return Fingerprinted(client, prints), Fingerprinted(done.sent, sent)


def _unannotated(entry: SentMessage) -> SentMessage:
    """Return the message as the engine may see it."""
    message = unannotated(entry.message)
    return entry if message is entry.message else msgspec.structs.replace(entry, message=message)
