"""Verdicts of a session: which messages they are on, how they meet, and their bounds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.sessions import verdicts

from leyline_proxy.model import verdicts as model
from leyline_proxy.model.spans import ANYTHING, SpanName
from leyline_proxy.model.verdicts import Verdict, VerdictIndex, keyed_print, with_verdicts

HIT = Verdict(("t0-a.1",), (7,), "verbs", "verdict", "api")
UNSEEN = Verdict(("t0-a.out",), (), "verbs", "verdict", "api")


@pytest.mark.parametrize(
    ("name", "value", "found"),
    [
        (SpanName("t9-z.0"), 7, HIT),
        (SpanName("t0-a.1"), 8, HIT),
        (SpanName("t9-z.0", ("t0-a.1",)), 8, None),
        (SpanName("t9-z.0", ("t0-a.2", "t0-a.out")), 8, UNSEEN),
        (SpanName("t0-a.out"), 8, UNSEEN),
        (SpanName("t9-z.0", (ANYTHING,)), 8, None),
    ],
)
def test_a_message_is_known_by_its_text_or_its_name(
    name: SpanName, value: int, found: Verdict | None
) -> None:
    """One that no request has shown is every message that may have become of it."""
    assert VerdictIndex([HIT, UNSEEN]).find(name, value) is found


@given(st.lists(verdicts()), st.lists(verdicts()), st.lists(verdicts()))
def test_no_verdict_is_lost(
    first: list[Verdict], second: list[Verdict], third: list[Verdict]
) -> None:
    """Each name and each text stays known, under the first verdict's span, and the same verdicts
    are no new ones."""
    known = with_verdicts(with_verdicts((), first), second)
    assert len(with_verdicts(known, [*first, *second])) == len(known)
    assert with_verdicts((), first[:1] * 2) == tuple(first[:1])
    after = with_verdicts(known, third)
    assert [each.span for each in after[: len(known)]] == [each.span for each in known]
    for each in (*first, *second, *third):
        index = VerdictIndex(after)
        assert all(index.find(SpanName(span), 0) for span in each.spans)
        assert all(index.find(SpanName("else"), value) for value in each.prints)


@given(st.lists(st.sampled_from(["api", "policy"]), max_size=12), st.integers(1, 5))
def test_a_callers_word_outlasts_a_policys(given_by: list[Any], most: int) -> None:
    """With too many, those that policies find again go first, the oldest of them."""
    every = [replace(HIT, spans=(f"s{n}",), prints=(n,), by=by) for n, by in enumerate(given_by)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "MAX_VERDICTS", most)
        kept = with_verdicts((), every)
    demanded = [each for each in every if each.by == "api"]
    found = [each for each in every if each.by == "policy"]
    spare = max(0, most - len(demanded))
    expected = {*demanded[:most], *(found[-spare:] if spare else ())}
    assert set(kept) == expected


def test_the_callers_own_word_takes_over() -> None:
    """A verdict of a policy becomes the caller's, and not the other way round."""
    found = replace(HIT, by="policy")
    assert with_verdicts([found], [HIT]) == (HIT,)
    assert with_verdicts([HIT], [found]) == (HIT,)


@given(st.integers(0, 20))
def test_forms_are_bounded(count: int) -> None:
    """A message that changes all the time is known by its first name and its newest forms."""
    known: tuple[Verdict, ...] = (HIT,)
    for number in range(100, 100 + count):
        known = with_verdicts(known, [replace(HIT, prints=(number,))])
    assert len(known[0].prints) <= 8
    assert known[0].prints[0] == 7
    assert known[0].prints[-1] == (99 + count if count else 7)


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_hashes_need_the_key(one: int, other: int) -> None:
    """Equal texts have equal hashes under one key, and others under another."""
    assert (keyed_print(one, b"k") == keyed_print(other, b"k")) is (one == other)
    assert keyed_print(one, b"k") not in (one, keyed_print(one, b"l"))
