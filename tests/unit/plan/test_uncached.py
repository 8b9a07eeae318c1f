"""Edits that no cached turn shows: each is listed once, then counted as standing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.builtin_specs import SPECS
from support.sessions import after_turn, blank, histories, history, pipeline

from leyline_engine.contract import Mode
from leyline_proxy.edits.prepare import PolicySession, prepare
from leyline_proxy.model.messages import Message
from leyline_proxy.model.prepared import Change, Prepared, SentMessage
from leyline_proxy.model.session import EditRecord, Session
from leyline_proxy.plan.uncached import MAX_LISTED, uncached_edits, was_sent
from leyline_proxy.request.declared import DeclaredEdit

MASK = "last_n_observations:n=1"
ALL = sorted(spec for specs in SPECS.values() for spec in specs)


def prepared_by(spec: str, messages: Sequence[Message], session: Session | None = None) -> Prepared:
    """A turn's messages under these policies."""
    index = session.next_index if session is not None else 0
    states = session.policy_states if session is not None else {}
    return prepare(messages, pipeline(spec), (), index, session=PolicySession(4000, states=states))


def places(records: Sequence[EditRecord]) -> list[int | None]:
    """The messages of some edits."""
    return [record.message for record in records]


@given(histories(), st.sampled_from(ALL))
def test_a_first_turn_is_called_edited_exactly_when_its_messages_differ(
    messages: list[Message], spec: str
) -> None:
    """For every built-in policy: an edit is listed exactly where what is sent isn't the list that
    came."""
    prepared = prepared_by(spec, messages)
    found = uncached_edits(prepared, None, ())
    assert bool(found.listed) is not prepared.sent_as_given
    assert not found.standing
    dropped = {item.client_index for item in prepared.dropped}
    assert dropped <= set(places(found.listed))


@given(histories(), st.sampled_from(ALL))
def test_the_same_edits_stand_on_the_next_turn(messages: list[Message], spec: str) -> None:
    """An edit listed on one turn isn't listed for the same list again: each edit is counted by
    cause and mode."""
    first = prepared_by(spec, messages)
    listed = uncached_edits(first, None, ()).listed
    session = after_turn(blank("s"), messages, spec)
    # The states that a policy left may make it edit more, or otherwise, than the first time.
    again = uncached_edits(session.turns[0].prepared, session, ())
    assert not again.listed
    assert sum(each.messages for each in again.standing) == len(listed)
    assert {(each.cause, each.mode) for each in again.standing} == {
        (record.cause, record.mode) for record in listed
    }


def test_a_grown_list_lists_only_the_new_edit() -> None:
    """A masking policy masks one result more: that one is listed, the older ones stay."""
    session = after_turn(blank("s"), history(3), MASK)
    prepared = prepared_by(MASK, history(4), session)
    found = uncached_edits(prepared, session, ())
    assert places(found.listed) == [7]
    assert [each.messages for each in found.standing] == [2]
    assert was_sent(prepared.client_fingerprints[7], session)


def test_an_edit_that_the_plan_shows_is_not_listed_again() -> None:
    """It is neither a message of the plan's account nor a message that a policy put in, by that
    account."""
    session = after_turn(blank("s"), history(3), MASK)
    prepared = prepared_by(MASK, history(4), session)
    shown = EditRecord(7, "tool", "policy:last_n_observations", "amortize", (4, 9), 2)
    assert uncached_edits(prepared, session, (shown,)).listed == ()


def test_a_message_put_in_is_listed_without_a_place() -> None:
    """A policy's own message has no place in the client's list; the same one is there next time."""
    client = tuple(history(1))
    change = Change("policy:note", Mode.AMORTIZE)
    note = SentMessage({"role": "user", "content": "Mind the budget."}, None, (change,))
    prepared = Prepared(client, (*map(SentMessage, client, range(4)), note))
    (record,) = uncached_edits(prepared, None, ()).listed
    assert (record.message, record.role, record.cause) == (None, "user", "policy:note")
    told = replace(record, span=(3, 9), cached=True)
    assert uncached_edits(prepared, None, (told,)).listed == ()
    session = after_turn(blank("s"), client)
    session = replace(session, turns=(replace(session.turns[0], prepared=prepared),))
    found = uncached_edits(prepared, session, ())
    assert (found.listed, [each.messages for each in found.standing]) == ((), [1])


def test_an_edit_of_a_turn_past_stands() -> None:
    """Of turns that are retained no more only names are known; their edits are no new ones."""
    session = after_turn(blank("s"), history(3), MASK)
    session = replace(session.forget_sources(), next_index=1)
    prepared = prepared_by(MASK, history(3), session)
    found = uncached_edits(prepared, session, ())
    assert (found.listed, [each.messages for each in found.standing]) == ((), [2])


def test_an_edit_undone_and_made_again_is_new() -> None:
    """The newest turn that had a message decides: it was sent whole there."""
    session = after_turn(blank("s"), history(3), MASK)
    session = after_turn(session, history(3), "keep_all")
    prepared = prepared_by(MASK, history(3), session)
    assert places(uncached_edits(prepared, session, ()).listed) == [3, 5]


def test_callers_own_changes_are_no_edits_of_the_prompt() -> None:
    """A caller that declares its own change sends the very list that goes out."""
    declared = DeclaredEdit(message=2, mode=Mode.AMORTIZE)
    prepared = prepare(history(2), (), (declared,), 0)
    assert uncached_edits(prepared, None, ()).listed == ()


@pytest.mark.parametrize("extra", [0, 3])
def test_a_list_of_edits_is_bounded(extra: int) -> None:
    """A long first turn lists so many and counts the rest."""
    prepared = prepared_by(MASK, history(MAX_LISTED + 1 + extra))
    found = uncached_edits(prepared, None, ())
    assert (len(found.listed), found.omitted) == (MAX_LISTED, extra)
