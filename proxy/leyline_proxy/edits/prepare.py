"""Turn the client's messages into the messages to send, with the cause of each change.

Declared edits come first, all or none, because they refer to the client's own text. Then the
policies run, in order. A policy that raises or returns nonsense is skipped as a whole, and the turn
continues without it; if that policy forgets, nothing may be sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec

from leyline_policies import Memo, Policy
from leyline_policies.recall import Evicted, evicted_by
from leyline_policies.recallable import recallable
from leyline_policies.verbs import is_annotated, pin_of, scopes_of, unannotated

from ..model.messages import Message, fingerprint
from ..model.prepared import Fingerprinted, Prepared, Quarantined, SentMessage
from ..model.working_set import WorkingSet
from ..request.declared import DeclaredEdit, apply_declared
from .condemned import without_addresses
from .edited import RECALLED
from .erratum import add_errata
from .materialised import Recall, Shelf, left_out, planned_set, restored
from .running import SAYS, Limit, PolicyRun, PolicySession, PolicyTimeoutError
from .stage import Stage, client_stage, declared_demands, find_fault

__all__ = ["Limit", "PolicySession", "PolicyTimeoutError", "prepare", "unedited"]

_PRINT = "fingerprint"
_EVICTED = "evicted"


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
    recall: Recall | None = None,
) -> Prepared:
    """Run declared edits and policies over the client's messages. Policies' faults never raise; a
    fault of a policy that forgets refuses the result. Such policies run first, on the client's own
    messages, so that no other can hide content from them, and again if others changed something.

    Args:
        fingerprints: the client's messages' fingerprints, if known.
        session: without it, policies know of no earlier turn.
        condemned: the client's messages that are in quarantine already.
        erratum: note at the end of shortened messages.
        recall: texts that may be put back.

    Raises:
        DeclaredEditError: a declared edit can't be applied; see :func:`check_declared`.
    """
    session, recall = session or PolicySession(), recall or Recall()
    memo, client = session.memo, tuple(client)
    fingerprints = fingerprints or memo.map(client, _PRINT, fingerprint)
    plain = client_stage(client, memo)
    # Policies see what is put back as they see everything else.
    untouched = stage = recall.put_back(plain, fingerprints, memo, condemned or ())
    if declared:
        stage = recall.put_back(_declared(plain, declared), fingerprints, memo, condemned or ())
    run = partial(PolicyRun, session, turn_index, condemned=condemned)
    runner, done = _edited(run, stage, policies, untouched)
    done, working_set = _materialised(recall.shelf, untouched, done, runner, session)
    evicted = _evicted(done := without_addresses(done, memo, session.sensitive), memo)
    done = add_errata(done, client, erratum, memo)
    done, scope, pins = _read_annotations(done, memo)
    return Prepared(
        client,
        done.sent,
        done.dropped,
        tuple(dict.fromkeys(done.faults)),
        done.own_demands,
        tuple(runner.notes),
        runner.states if policies else {**session.states, **runner.states},  # earlier ones stay
        tuple(runner.wanted),
        scope,
        pins,
        frozenset(runner.used),
        done.refused,
        runner.quarantined,
        evicted,
        untouched is not plain,
        RECALLED in done.demands,
        working_set,
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


def _edited(
    runner_of: Callable[..., PolicyRun],
    stage: Stage,
    policies: Sequence[Policy],
    untouched: Stage,
) -> tuple[PolicyRun, Stage]:
    """Return the list after all policies, and their run."""
    runner = runner_of(checked=False)
    done = runner.run_all(stage, policies, untouched)
    is_changed = done.refused is None and done.messages is not stage.messages
    if is_changed and find_fault(stage.messages, done.messages, runner.memo):
        # A trusted policy broke the rules: find out which, and leave it out.
        runner = runner_of(checked=True)
        done = runner.run_all(stage, policies, untouched)
    return runner, done


def _materialised(
    shelf: Shelf | None,
    untouched: Stage,
    done: Stage,
    runner: PolicyRun,
    session: PolicySession,
) -> tuple[Stage, WorkingSet | None]:
    """Return the list with a request's working set, and the set's plan."""
    if shelf is None or done.refused is not None:
        return done, None
    condemned = runner.condemned.keys() | runner.quarantined.keys()
    found = planned_set(shelf, untouched, done, condemned, session)
    if found.restore:
        done = restored(done, untouched, found.restore)
    if found.evict:
        policy = left_out(done, set(found.evict))
        done = runner.apply(done, recallable(policy) if shelf.recall else policy)
    return done, found


def _put_back(
    back: Callable[..., Stage], untouched: Stage, stage: Stage, condemned: Mapping[int, Quarantined]
) -> tuple[Stage, Stage]:
    """Return the client's list and the one with its declared edits, both with recalled texts."""
    filled = back(untouched, gone=condemned)
    return filled, filled if stage is untouched else back(stage, gone=condemned)


def _evicted(done: Stage, memo: Memo) -> tuple[Evicted, ...]:
    """Return the texts that policies evicted with an address in their stubs, each once."""
    found = memo.map(done.messages, _EVICTED, evicted_by, "evicted")
    return tuple({each.address: each for texts in found for each in texts}.values())


def _declared(untouched: Stage, declared: Sequence[DeclaredEdit]) -> Stage:
    sent, dropped = apply_declared(untouched.sent, declared)
    return replace(untouched, sent=sent, dropped=dropped, demands=declared_demands(sent, dropped))


def _read_annotations(
    done: Stage, memo: Memo
) -> tuple[Stage, str | None, dict[int, Mapping[str, Any]]]:
    """Return the list as the engine may see it, and the scope and pins that its messages name."""
    if not memo.any(done.messages, SAYS, is_annotated, "sent"):
        return done, None, {}
    scopes, pins = scopes_of(done.messages), _pins_of(done.sent)
    scope = next(iter(scopes)) if len(scopes) == 1 else None
    return replace(done, sent=tuple(map(_unannotated, done.sent))), scope, pins


def _pins_of(sent: Sequence[SentMessage]) -> dict[int, Mapping[str, Any]]:
    """Return the terms of messages whose KV stays, by index in the client's list."""
    said = ((entry.client_index, pin_of(entry.message)) for entry in sent)
    return {index: terms for index, terms in said if index is not None and terms is not None}


def _fingerprinted(
    client: tuple[Message, ...], fingerprints: Sequence[int], done: Stage, memo: Memo
) -> tuple[Fingerprinted, ...]:
    """Return both lists with fingerprints; those of edited messages are computed only once."""
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
