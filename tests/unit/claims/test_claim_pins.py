"""Pinned messages: what a turn asks for, when it is sent again, and how policies say it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.character_turns import retained

from leyline_engine.contract import MAX_TTL_S, ClaimKind, LineageRun
from leyline_engine.contract.claim import MAX_PRIORITY
from leyline_policies.verbs import pin, pinned
from leyline_proxy.claims.pins import MAX_PINS, HeldPin, WantedPin, pin_key, wanted_pins
from leyline_proxy.model.messages import Message
from leyline_proxy.model.prepared import Prepared, SentMessage
from leyline_proxy.model.session import RetainedTurn
from leyline_proxy.request.annotations import Annotation, Pin, annotations_of


def turn_of(*texts: str, lineage: tuple[LineageRun, ...] = (), name: str = "t0") -> RetainedTurn:
    """A turn of users' messages."""
    messages: list[Message] = [{"role": "user", "content": text} for text in texts]
    sent = tuple(SentMessage(message, index) for index, message in enumerate(messages))
    return retained(Prepared(tuple(messages), sent), name, lineage=lineage)


def wanted(turn: RetainedTurn, index: int = 1, terms: Pin | None = None) -> WantedPin:
    """The pin of one message."""
    (found,) = wanted_pins(turn, {index: terms or Pin()}, "s").values()
    return found


def test_equal_kv_is_one_place_whatever_the_turn_is_called() -> None:
    """Text after the message doesn't matter; text, place and lineage before its end do."""
    first = wanted(turn_of("one", "plan"))
    assert wanted(turn_of("one", "plan", "more", name="t1")).place != first.place, (
        "the last message's span ends with the prompt"
    )
    inner = wanted(turn_of("one", "plan", "a"))
    assert wanted(turn_of("one", "plan", "a", "b", name="t1")).place == inner.place
    assert wanted(turn_of("two", "plan", "a")).place != inner.place
    assert wanted(turn_of("onee", "plan", "a")).place != inner.place
    before, behind = (LineageRun(5, "l"),), (LineageRun(inner.predicate.end, "l"),)
    assert wanted(turn_of("one", "plan", "a", lineage=before)).place != inner.place
    assert wanted(turn_of("one", "plan", "a", lineage=behind)).place == inner.place
    other_run = replace(turn_of("one", "plan", "a"), model_fingerprint="m@2")
    assert wanted(other_run).place != inner.place


def test_a_pin_is_due_at_half_its_time_or_when_it_means_something_else() -> None:
    """It isn't due earlier."""
    there = wanted(turn_of("one", "plan", "a"), terms=Pin(ttl_s=100))
    held = HeldPin(there, 1, sent_at=50.0)
    assert not held.is_due(there, 99.9)
    assert held.is_due(there, 100.0)
    assert held.is_due(wanted(turn_of("two", "plan", "a"), terms=Pin(ttl_s=100)), 50.0)
    assert held.is_due(wanted(turn_of("one", "plan", "a")), 50.0)


def test_claims_are_named_by_session_and_message() -> None:
    """The same on every turn, another for every message and session, and fit for a path."""
    names = {pin_key(session, name) for session in ("s", "t") for name in ("t0.0", "t0.1")}
    assert len(names) == 4
    assert pin_key("s", "t0.0") == pin_key("s", "t0.0")
    claim = wanted(turn_of("one", "plan")).claim(pin_key("s", "t0.1"), "tenant", "s", 3)
    assert (claim.kind, claim.priority, claim.ttl_s, claim.revision) == (
        ClaimKind.SOFT,
        50,
        3600,
        3,
    )


def test_a_session_has_so_many_pins() -> None:
    """The first ones count."""
    turn = turn_of(*(f"text {n}" for n in range(MAX_PINS + 2)))
    found = wanted_pins(turn, dict.fromkeys(range(MAX_PINS + 2), Pin()), "s")
    assert len(found) == MAX_PINS
    assert pin_key("s", turn.names.client[MAX_PINS].id) not in found


@pytest.mark.parametrize(
    "terms",
    [{}, {"kind": "hard"}, {"priority": 0}, {"priority": MAX_PRIORITY, "ttl_s": MAX_TTL_S}],
)
def test_what_a_policy_pins_is_what_a_caller_may_say(terms: dict[str, Any]) -> None:
    """The verb writes an annotation that the proxy reads, and the message is pinned by it."""
    message = pin({"role": "user", "content": "x"}, **terms)
    said = annotations_of([message])[0]
    assert said.pinned == Pin(**{**terms, "kind": ClaimKind(terms.get("kind", "soft"))})
    assert pinned([message]) == {0}


@pytest.mark.parametrize(
    "terms",
    [
        {"kind": "firm"},
        {"priority": -1},
        {"priority": MAX_PRIORITY + 1},
        {"priority": True},
        {"ttl_s": 0},
        {"ttl_s": MAX_TTL_S + 1},
        {"ttl_s": 1.5},
    ],
)
def test_a_policy_that_pins_on_impossible_terms_is_told(terms: dict[str, Any]) -> None:
    """The message gives the name of the term."""
    with pytest.raises(ValueError, match=next(iter(terms))):
        pin({"role": "user", "content": "x"}, **terms)


def test_an_object_without_terms_pins_like_true() -> None:
    """It does so before policies, too; false doesn't."""
    said = [{"pin": {}}, {"pin": True}, {"pin": False}, {}]
    messages: list[Message] = [{"role": "user", "content": "x", "leyline": each} for each in said]
    found = annotations_of(messages)
    assert [found[index].pinned for index in range(4)] == [Pin(), Pin(), None, None]
    assert pinned(messages) == {0, 1}
    assert Annotation().pinned is None
