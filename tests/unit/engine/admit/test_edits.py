"""Resolving an edit: labels that count, what a directive names, what may still be copied."""

from __future__ import annotations

from array import array

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_kit import SCOPE, SESSION, Turn, opened, spliced
from support.examples import examples
from support.replay_engine import (
    edit,
    make_engine,
    random_tokens,
    reference,
    register,
    run,
    same_logits,
)

from leyline_engine.admit.edits import (
    EditRefusedError,
    check_lineage,
    check_spans,
    forgotten_spans,
    resolve_edit,
)
from leyline_engine.contract import (
    CopySegment,
    Directive,
    EditPayload,
    LineageRun,
    LiteralSegment,
    Mode,
    Outcome,
    Reason,
    Recompute,
    Segment,
    SourceRef,
    SpanLabel,
)
from leyline_engine.records.ledger import SpanKey, SpanLedger
from leyline_engine.records.sources import SourceRegistry, SourceTurn

PLACES = st.integers(0, 12)
LABELS = st.lists(st.tuples(PLACES, PLACES), max_size=5)
NAMES = ("1", "2", "3", "unheard of")


@given(LABELS, PLACES)
def test_labels_are_believed_if_they_are_sorted_and_lie_in_the_prompt(
    spans: list[tuple[int, int]], length: int
) -> None:
    """They may overlap, begin at one place, or be empty; anything else is refused."""
    sorted_ = [start for start, _ in spans] == sorted(start for start, _ in spans)
    good = sorted_ and all(start <= end <= length for start, end in spans)
    labels = [SpanLabel(str(index), *span) for index, span in enumerate(spans)]
    try:
        check_spans(labels, length)
    except EditRefusedError as refused:
        assert refused.reason is Reason.INVALID_EDIT
        assert not good
    else:
        assert good


@given(st.lists(PLACES, max_size=4))
def test_a_lineage_map_is_believed_if_it_is_sorted(starts: list[int]) -> None:
    """No two of its runs begin at one place."""
    try:
        check_lineage([LineageRun(start, "l") for start in starts])
    except EditRefusedError as refused:
        assert refused.reason is Reason.INVALID_EDIT
        assert starts != sorted(set(starts))
    else:
        assert starts == sorted(set(starts))


@given(
    LABELS.map(lambda spans: sorted((min(s), max(s)) for s in spans if s[0] != s[1])),
    st.lists(st.tuples(PLACES, PLACES, st.sampled_from(Mode)), max_size=3),
    st.sets(st.sampled_from(NAMES), max_size=2),
)
def test_a_forget_directive_names_every_label_under_it(
    spans: list[tuple[int, int]], cuts: list[tuple[int, int, Mode]], names: set[str]
) -> None:
    """They are the labels of its tokens, or of those after an insertion, and no others; nothing is
    named where a token before its end has no label, or a name was never heard of."""
    labels = tuple(SpanLabel(str(index), *span) for index, span in enumerate(spans))
    source = SourceTurn("t", array("q", [0] * 12), "", (), SCOPE, SESSION, labels)
    ledger = SpanLedger()
    ledger.label((SCOPE, SESSION), [*NAMES[:-1], *(label.span for label in labels)])
    directives = tuple(Directive(min(s, t), max(s, t), (), mode) for s, t, mode in cuts)
    payload = EditPayload(
        session=SESSION, scope=SCOPE, turn="t2", directives=directives, forget=tuple(names)
    )
    forgets = [d for d in directives if d.mode is Mode.FORGET]
    owners = [{label.span for label in labels if label.start <= p < label.end} for p in range(12)]
    expected: set[str] | None = {*names}
    for d in forgets:
        for p in range(d.start, min(12, max(d.end, d.start + 1))):
            expected = {*(expected or ()), *owners[p]}
    if any(not owners[p] for d in forgets for p in range(d.end)) or NAMES[-1] in names:
        expected = None
    found = forgotten_spans(payload, [source], ledger)
    assert found == (
        None if expected is None else {SpanKey(SCOPE, SESSION, name) for name in expected}
    )
    unresolved = forgotten_spans(payload, [], ledger)
    assert unresolved == (None if forgets else found)


@st.composite
def edits(draw: st.DrawFn) -> tuple[SpanLedger, list[Turn], EditPayload, array[int]]:
    """Two sources, one of them perhaps a splice of the other, and a turn that draws on both."""
    ledger = SpanLedger()
    first = opened(draw(st.lists(st.integers(1, 9), min_size=6, max_size=14)))
    second = opened(draw(st.lists(st.integers(1, 9), min_size=6, max_size=14)), "t1")
    if draw(st.booleans()):
        start = draw(st.integers(0, len(first.spans) - 2))
        cut = CopySegment(0, start, len(first.spans), draw(st.integers(0, start)))
        second = spliced(ledger, "l", [first], [cut], fresh=10)
    turns = [first, second]
    names = sorted({*map(str, first.spans), *map(str, second.spans)})
    ledger.label((SCOPE, SESSION), names)
    prompt: list[int] = []
    segments: list[Segment] = []
    for _ in range(draw(st.integers(1, 3))):
        which = draw(st.integers(0, 1))
        start = draw(st.integers(0, len(turns[which].spans) - 1))
        end = draw(st.integers(start + 1, len(turns[which].spans)))
        segments += [
            LiteralSegment(len(prompt), 1),
            CopySegment(which, start, end, len(prompt) + 1),
        ]
        prompt += [11, *turns[which].spans[start:end]]
    directives = []
    for which, turn in enumerate(turns):
        if draw(st.booleans()):
            start = draw(st.integers(0, len(turn.spans) - 1))
            end = draw(st.integers(start + 1, len(turn.spans)))
            directives.append(Directive(start, end, (), draw(st.sampled_from(Mode)), which))
    payload = EditPayload(
        session=SESSION,
        scope=SCOPE,
        turn="now",
        sources=tuple(SourceRef(t.source.turn, len(t.spans), t.source.digest) for t in turns),
        directives=tuple(directives),
        segments=tuple(segments),
        forget=tuple(draw(st.sets(st.sampled_from([*names, "unheard of"]), max_size=2))),
    )
    return ledger, turns, payload, array("q", prompt)


@settings(max_examples=examples(150))
@given(edits())
def test_no_copy_of_an_edit_has_read_what_it_forgets(
    given_: tuple[SpanLedger, list[Turn], EditPayload, array[int]],
) -> None:
    """A copy ends before the first token whose KV has read a forgotten span, as the ledger knows
    it; a copy of what a directive takes out is refused; of an unknown name's readers none is
    copied."""
    ledger, turns, payload, prompt = given_
    registry = SourceRegistry()
    for turn in turns:
        registry.retain((SCOPE, SESSION), turn.source)
    asked = [each for each in payload.segments if isinstance(each, CopySegment)]
    removed = any(
        copy.source == directive.source
        and max(copy.start, directive.start) < min(copy.end, directive.end)
        for copy in asked
        for directive in payload.directives
    )
    try:
        found = resolve_edit(payload, prompt, registry, ledger)
    except EditRefusedError as refused:
        assert removed and refused.reason is Reason.INVALID_EDIT
        return
    assert not removed
    forgotten = {int(name) for name in payload.forget if name.isdigit()}
    for directive in payload.directives:
        if directive.mode is Mode.FORGET:
            forgotten.update(turns[directive.source].spans[directive.start : directive.end])
    for copy in found.copies:
        read = turns[copy.source].read[copy.start : copy.end]
        assert not any(forgotten & each for each in read)
    if "unheard of" in payload.forget:
        assert found.forgotten is None and not found.copies
        return
    keys = frozenset(SpanKey(SCOPE, SESSION, str(span)) for span in forgotten)
    assert found.forgotten == keys
    limits = [ledger.first_reader(turn.source, keys) for turn in turns]
    kept = [msgspec.structs.replace(c, end=min(c.end, limits[c.source])) for c in asked]
    assert list(found.copies) == [copy for copy in kept if copy.start < copy.end]


SOURCE = random_tokens(200, 3)


def test_labels_that_are_not_sorted_are_not_relied_on() -> None:
    """The edit is refused by name, and what the turn held can only be forgotten with all else."""
    engine = make_engine(pool=1200)
    spoilt = (SpanLabel("m2", 100, 200), SpanLabel("m1", 0, 100))
    _, record = run(engine, SOURCE, msgspec.structs.replace(register("t1"), spans=spoilt))
    assert record.receipt.reason is Reason.INVALID_EDIT
    asked = msgspec.structs.replace(register("t2"), forget=("m2",))
    _, forgot = run(engine, [*SOURCE[:150], 7], asked)
    assert forgot.receipt.forgot is not None and forgot.receipt.forgot.overwritten == 50


def test_a_refused_edit_is_served_nothing_that_was_spliced() -> None:
    """It runs as an ordinary prefill, though the lineage that it names is its own and cached."""
    engine = make_engine(pool=1200)
    run(engine, SOURCE, register("t1"))
    prompt, payload = edit(SOURCE, [Directive(60, 80)], tail=[9])
    _, record = run(engine, prompt, payload)
    lineage = record.receipt.lineage
    wrong = msgspec.structs.replace(
        register("t3"), lineage=lineage, sources=(SourceRef("t1", 200, "0" * 16),)
    )
    logits, refused = run(engine, [*prompt, 5], wrong)
    assert refused.receipt.reason is Reason.TOKEN_MISMATCH
    assert (refused.receipt.tokens.prefix, refused.receipt.lineage) == (60, ())
    assert same_logits(logits, reference([*prompt, 5]))


@pytest.mark.parametrize("splicing", [True, False])
def test_a_turn_that_asks_for_nothing_is_refused_nothing(splicing: bool) -> None:
    """Registering a turn is no edit, with and without a splicing engine."""
    engine = make_engine(splicing=splicing)
    _, record = run(engine, SOURCE, register("t1"))
    assert (record.receipt.outcome, record.receipt.reason) == (Outcome.UNEDITED, None)


def test_a_second_splice_under_a_share_goes_on_with_the_first() -> None:
    """A scope's KV begins in one place, however often it is edited later; the next turn finds it
    under a map that the engine takes back."""
    engine = make_engine(pool=2000)
    run(engine, SOURCE, register("t1"))
    prompt, payload = edit(SOURCE, [Directive(60, 80)], tail=[9])
    _, record = run(engine, prompt, msgspec.structs.replace(payload, share="crew"))
    lineage = record.receipt.lineage
    again, payload = edit(
        prompt, [Directive(100, 105)], source_turn="t2", turn="t3", lineage=lineage, tail=[8]
    )
    _, record = run(engine, again, msgspec.structs.replace(payload, share="crew"))
    assert record.receipt.tokens.spliced > 0
    assert record.receipt.lineage == lineage
    other = msgspec.structs.replace(register("t", session="other"), share="crew")
    _, found = run(engine, [*again, 7], other)
    assert (found.receipt.tokens.prefix, found.receipt.lineage) == (len(again), lineage)


@pytest.mark.parametrize("kind", ["gqa", "mla"])
def test_an_engines_profile_holds_whatever_a_payload_copies(kind: str) -> None:
    """The boundary and the quotes are computed again, to the bit as if the payload had left them
    out; an engine without a profile copies them."""
    cut = random_tokens(40, 1)
    source = [
        *random_tokens(60, 2),
        *cut,
        *random_tokens(50, 3),
        *cut[10:20],
        *random_tokens(30, 4),
    ]
    whole = Directive(60, 100, (7, 8), Mode.AMORTIZE)
    careful = [
        Directive(60, 105, (7, 8, *source[100:105]), Mode.AMORTIZE),
        Directive(150, 160, tuple(source[150:160]), Mode.AMORTIZE),
    ]
    found = {}
    for name, recompute, directives in (
        ("profile", Recompute(5, 3), [whole]),
        ("payload", Recompute(), careful),
        ("both", Recompute(5, 3), careful),
        ("neither", Recompute(), [whole]),
    ):
        engine = make_engine(kind, recompute=recompute)
        run(engine, source, register("t1"))
        prompt, payload = edit(source, directives, tail=random_tokens(9, 5))
        found[name] = run(engine, prompt, payload)
    spliced = {name: record.receipt.tokens.spliced for name, (_, record) in found.items()}
    assert spliced["profile"] == spliced["payload"] == spliced["neither"] - 15
    assert torch.equal(found["profile"][0], found["payload"][0])
    assert not torch.equal(found["profile"][0], found["neither"][0])
    assert spliced["both"] < spliced["profile"]  # the directives now end later
