"""The ledger of spans against sequences whose every position knows what it has read."""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_kit import SCOPE, SESSION, opened, spliced, true_reader, turn_of
from support.examples import examples

from leyline_engine.contract import CopySegment, LineageRun, SpanLabel
from leyline_engine.records import ledger as ledger_module
from leyline_engine.records.ledger import (
    ANYTHING,
    MAX_READERS,
    MAX_SHARED_STARTS,
    Carried,
    SpanKey,
    SpanLedger,
    anything_of,
)
from leyline_engine.records.lineage import first_unlabelled
from leyline_engine.records.sources import SourceTurn


@settings(max_examples=examples(200), deadline=None)
@given(data=st.data())
def test_no_reader_stands_before_the_ledgers(data: st.DataObject) -> None:
    """Over chains of splices from several sources every reader lies at or after the position that
    the ledger gives, and a span that nothing read is given no reader but by glue."""
    ledger = SpanLedger()
    spans = data.draw(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 4)), min_size=3))
    turns = [opened([span for span, length in spans for _ in range(length)])]
    for number in range(data.draw(st.integers(1, 5))):
        sources = [turns[data.draw(st.integers(0, len(turns) - 1))] for _ in range(2)]
        prefix = data.draw(st.integers(0, len(sources[0].spans)))
        cuts = []
        for _ in range(data.draw(st.integers(1, 3))):
            which = data.draw(st.integers(0, 1))
            start = data.draw(st.integers(0, len(sources[which].spans) - 1))
            end = data.draw(st.integers(start + 1, len(sources[which].spans)))
            cuts.append(CopySegment(which, start, end, prefix))
        turns.append(spliced(ledger, f"l{number}", sources, cuts, fresh=20 + number))
    for turn in turns:
        for span in range(1, 30):
            assert ledger.first_reader(
                turn.source, [SpanKey(SCOPE, SESSION, str(span))]
            ) <= true_reader(turn, span)


def test_a_ledger_without_hidden_readers_would_be_caught() -> None:
    """The control: visible labels alone miss the reader that a splice has moved."""
    ledger = SpanLedger()
    first = opened([1, 1, 2, 2, 3, 3])
    second = spliced(ledger, "l", [first], [CopySegment(0, 4, 6, 2)], fresh=9)
    assert second.spans == [1, 1, 9, 3, 3, 9]
    key = [SpanKey(SCOPE, SESSION, "2")]
    assert true_reader(second, 2) == ledger.first_reader(second.source, key) == 3
    assert ledger.first_reader(replace(second.source, lineage=()), key) == 6


def test_a_reader_is_followed_through_a_second_splice() -> None:
    """A span's readers stay its readers when they move, even where the span is long gone."""
    ledger = SpanLedger()
    first = opened([1, 2, 3, 4, 5])
    second = spliced(ledger, "a", [first], [CopySegment(0, 2, 5, 1)], fresh=9)
    assert second.spans == [1, 9, 3, 4, 5, 9]
    third = spliced(ledger, "b", [second], [CopySegment(0, 4, 6, 2)], fresh=8)
    assert third.spans == [1, 9, 8, 5, 9, 8]
    assert ledger.first_reader(third.source, [SpanKey(SCOPE, SESSION, "2")]) == 3
    assert ledger.first_reader(third.source, [SpanKey(SCOPE, SESSION, "3")]) == 3
    assert ledger.first_reader(third.source, [SpanKey(SCOPE, SESSION, "7")]) == 6


def test_a_copy_from_before_a_span_has_not_read_it() -> None:
    """Only text after the span in its source carries it along."""
    ledger = SpanLedger()
    first = opened([1, 1, 2, 3, 4, 4])
    moved = spliced(ledger, "a", [first], [CopySegment(0, 1, 3, 0)], fresh=9)
    assert moved.spans == [9, 1, 2, 9]
    assert ledger.first_reader(moved.source, [SpanKey(SCOPE, SESSION, "3")]) == 4
    assert ledger.first_reader(moved.source, [SpanKey(SCOPE, SESSION, "1")]) == 1


def test_a_struck_span_has_no_reader_any_more() -> None:
    """After a forget the same lineage is clean again of that span, not of another."""
    ledger = SpanLedger()
    first = opened([1, 2, 3, 4])
    second = spliced(ledger, "a", [first], [CopySegment(0, 3, 4, 1)], fresh=9)
    two, three = SpanKey(SCOPE, SESSION, "2"), SpanKey(SCOPE, SESSION, "3")
    assert ledger.lineages_reading(SCOPE, [two]) == {(SCOPE, "a"): 2}
    assert ledger.lineages_reading("other", [two]) == {}
    ledger.strike(SCOPE, [two])
    assert ledger.first_reader(second.source, [two]) == len(second.spans)
    assert ledger.first_reader(second.source, [three]) == 2


def test_an_unknown_lineage_has_read_everything() -> None:
    """If a lineage's record had to go, nothing under it counts as clean."""
    ledger = SpanLedger(max_lineages=1)
    assert ledger.enter(SCOPE, Carried("a", 2, {})) == ()
    source = turn_of("t", [1, 1, 2, 2], (LineageRun(2, "a"),))
    assert ledger.first_reader(source, [SpanKey(SCOPE, SESSION, "9")]) == 4
    assert ledger.enter(SCOPE, Carried("b", 0, {})) == ((SCOPE, "a"),)
    assert ledger.first_reader(source, [SpanKey(SCOPE, SESSION, "9")]) == 2
    carried = ledger.carry([source], [CopySegment(0, 3, 4, 7)], [0])
    assert carried[ANYTHING] == 7


def test_the_tenant_with_most_lineages_loses_its_oldest() -> None:
    """A tenant that enters many drops its own records, not another's."""
    ledger = SpanLedger(max_lineages=4)
    ledger.enter("small", Carried("kept", 0, {}))
    dropped = [ledger.enter("large", Carried(str(number), 0, {})) for number in range(6)]
    assert [key for keys in dropped for key in keys] == [("large", str(n)) for n in range(3)]
    assert ledger.lineage_count() == 4


def test_a_lineage_is_offered_only_where_all_its_entries_are() -> None:
    """A second entry of a lineage takes groups away, and gives none; an edit's has none."""
    ledger, runs = SpanLedger(), (LineageRun(2, "a"),)
    both = frozenset("xy")
    source = replace(turn_of("t", [1, 1, 2, 2], runs), groups=both)
    assert ledger.offered_length(source, both) == 2
    for groups, in_x, in_y in (("xy", 4, 4), ("x", 4, 2), ("xy", 4, 2), ("", 2, 2)):
        ledger.enter(SCOPE, Carried("a", 2, {}, foreign=True, groups=frozenset(groups)))
        assert ledger.offered_length(source, frozenset("x")) == in_x
        assert ledger.offered_length(source, frozenset("y")) == in_y
    ledger.enter(SCOPE, Carried("b", 2, {}))
    ledger.enter(SCOPE, Carried("b", 2, {}, foreign=True, groups=both))
    assert ledger.offered_length(replace(source, lineage=(LineageRun(2, "b"),)), both) == 2


def test_a_lineage_with_too_many_spans_keeps_the_first_position() -> None:
    """A bound on spans per lineage makes the answer coarser, never wrong."""
    ledger = SpanLedger()
    many = {SpanKey(SCOPE, SESSION, str(n)): 100 + n for n in range(MAX_READERS + 1)}
    ledger.enter(SCOPE, Carried("a", 50, many))
    source = turn_of("t", [1] * 200, (LineageRun(50, "a"),))
    assert ledger.first_reader(source, [SpanKey(SCOPE, SESSION, "unheard of")]) == 100


SPANS = st.sampled_from(
    [SpanKey("x", "s", "1"), SpanKey("x", "t", "1"), SpanKey("y", "s", "1"), SpanKey("y", "s", "2")]
)
ENTERED = st.tuples(
    st.sampled_from("xy"),
    st.sampled_from("ab"),
    st.dictionaries(SPANS, st.integers(0, 30), max_size=4),
)
STRUCK = st.tuples(st.sampled_from("xy"), st.frozensets(SPANS, min_size=1))
MAPS = st.lists(st.tuples(st.integers(0, 30), st.sampled_from("abc")), max_size=3)


@given(st.lists(ENTERED | STRUCK, max_size=8), STRUCK, MAPS, st.integers(0, 35))
def test_readers_are_those_that_were_entered_and_not_struck(
    steps: list[Any], asked: tuple[str, frozenset[SpanKey]], map_: list[Any], length: int
) -> None:
    """Lineages keep the first of all readers they were given, of any tenant's spans, until these
    are struck; one with too many keeps each tenant's first as the reader of all of its spans."""
    facts: dict[tuple[str, str], set[tuple[SpanKey, int]]] = {}
    ledger = SpanLedger()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ledger_module, "MAX_READERS", 2)
        for scope, *rest in steps:
            if len(rest) == 2:
                foreign = any(span.scope != scope for span in rest[1])
                ledger.enter(scope, Carried(rest[0], 0, rest[1], foreign=foreign))
                known = facts.setdefault((scope, rest[0]), set())
                known.update(rest[1].items())
                if len({span for span, _ in known}) > 2:
                    facts[scope, rest[0]] = {
                        (anything_of(span.scope), min(a for s, a in known if s.scope == span.scope))
                        for span, _ in known
                    }
            else:
                gone = {span for span in rest[0] if span.scope == scope}
                ledger.strike(scope, gone)
                for key, known in facts.items():
                    facts[key] = {fact for fact in known if fact[0] not in gone}
    scope = asked[0]
    spans = {span for span in asked[1] if span.scope == scope}
    wanted = {*spans, anything_of(scope), ANYTHING}
    reading = {
        key: min(at for span, at in known if span in wanted)
        for key, known in facts.items()
        if any(span in wanted for span, _ in known)
    }
    assert ledger.lineages_reading(scope, spans) == reading
    for session in "st":
        assert ledger.hidden_spans((scope, session)) == {
            span
            for known in facts.values()
            for span, _ in known
            if (span.scope, span.session) == (scope, session)
        }
    assert ledger.borrowers(scope) == {scope} | {
        owner for (owner, _), known in facts.items() if any(s.scope == scope for s, _ in known)
    }
    runs = tuple(LineageRun(start, name) for start, name in sorted(dict(map_).items()))
    read: list[set[SpanKey]] = []
    for position in range(length):
        governing = [run for run in runs if run.start <= position][-1:]
        unknown: set[tuple[SpanKey, int]] = {(ANYTHING, 0)}
        known = facts.get((scope, governing[0].lineage), unknown) if governing else set()
        read.append({span for span, at in known if at <= position})
    first = [at for at, here in enumerate(read) if not here.isdisjoint(wanted)]
    assert ledger.hidden_reader(runs, scope, spans, length) == min(first, default=length)
    assert ledger.remembered(runs, scope, length) == set().union(*read)


def test_names_are_known_until_a_bound_drops_them() -> None:
    """A name that the ledger may have lost is unknown, so that a forget of it spares nothing."""
    ledger = SpanLedger(max_sessions=2, max_names=3)
    ledger.label((SCOPE, "a"), ["m1", "m2"])
    assert ledger.knows((SCOPE, "a"), ["m1", "m2"])
    assert not ledger.knows((SCOPE, "a"), ["m1", "m3"])
    assert not ledger.knows(("other", "a"), ["m1"])
    ledger.label((SCOPE, "a"), ["m3", "m4"])
    assert not ledger.knows((SCOPE, "a"), ["m1"])
    ledger.label((SCOPE, "b"), ["m1"])
    ledger.label((SCOPE, "c"), ["m1"])
    ledger.label((SCOPE, "d"), ["m1"])
    assert not ledger.knows((SCOPE, "b"), ["m1"])
    assert ledger.knows((SCOPE, "d"), ["m1"])


def test_shared_starts_are_few_and_latest_first() -> None:
    """A scope's shared KV is looked for at a bounded number of positions."""
    ledger = SpanLedger()
    for start in range(MAX_SHARED_STARTS + 2):
        ledger.enter(SCOPE, Carried("share x", start, {}, "x"))
    starts = ledger.shared_starts(SCOPE, "x")
    assert len(starts) == MAX_SHARED_STARTS
    assert starts[0] == MAX_SHARED_STARTS + 1
    assert ledger.shared_starts("other", "x") == ()


def test_what_no_label_covers_counts_as_read() -> None:
    """A gap between labels is the first position whose owner isn't known."""
    whole = (SpanLabel("a", 0, 4), SpanLabel("b", 3, 9))
    assert first_unlabelled(whole, 9) == 9
    assert first_unlabelled(whole[1:], 9) == 0
    assert first_unlabelled((SpanLabel("a", 0, 4), SpanLabel("b", 5, 9)), 9) == 4
    gap = SourceTurn("t", array("q", range(9)), "", (), SCOPE, SESSION, whole[:1])
    assert SpanLedger().first_reader(gap, [SpanKey(SCOPE, SESSION, "z")]) == 4
