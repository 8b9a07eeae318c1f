"""Payloads that lie are refused by name, the request is served, and nothing of the edit is left."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import msgspec
import pytest
from support.replay_engine import (
    SCOPE,
    VOCAB,
    edit,
    make_engine,
    random_tokens,
    reference,
    register,
    retained,
    run,
    same_logits,
    snapshot,
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
    SourceRef,
    SpanLabel,
    token_digest,
)

SOURCE = random_tokens(90, 1)
PROMPT, GOOD = edit(SOURCE, [Directive(40, 50, (3, 3))], tail=[5, 6, 7])
# GOOD's segments: copy [0, 40) -> 0, literal [40, 42), copy [50, 90) -> 42, literal [82, 85)
REF = GOOD.sources[0]


def with_segment(index: int, segment: CopySegment | LiteralSegment) -> EditPayload:
    """GOOD with one segment exchanged."""
    segments = list(GOOD.segments)
    segments[index] = segment
    return msgspec.structs.replace(GOOD, segments=tuple(segments))


def but(**changes: object) -> EditPayload:
    """GOOD with fields exchanged."""
    return msgspec.structs.replace(GOOD, **changes)


CASES: dict[str, tuple[EditPayload, Reason]] = {
    "lying digest": (but(sources=(SourceRef("t1", 90, "0" * 16),)), Reason.TOKEN_MISMATCH),
    "lying length": (but(sources=(SourceRef("t1", 89, REF.digest),)), Reason.TOKEN_MISMATCH),
    "digest of a prefix": (
        but(sources=(SourceRef("t1", 80, token_digest(SOURCE[:80])),)),
        Reason.TOKEN_MISMATCH,
    ),
    "unknown session": (but(session="nobody"), Reason.MISSING_SOURCE),
    "unknown turn": (but(sources=(SourceRef("t9", 90, REF.digest),)), Reason.MISSING_SOURCE),
    "another scope": (but(scope="other"), Reason.MISSING_SOURCE),
    "one source of two missing": (
        but(sources=(REF, SourceRef("t9", 1, "x"))),
        Reason.MISSING_SOURCE,
    ),
    "unsorted segments": (but(segments=GOOD.segments[::-1]), Reason.INVALID_EDIT),
    "overlapping segments": (with_segment(1, LiteralSegment(39, 3)), Reason.INVALID_EDIT),
    "gap between segments": (with_segment(1, LiteralSegment(41, 1)), Reason.INVALID_EDIT),
    "not starting at zero": (but(segments=GOOD.segments[1:]), Reason.INVALID_EDIT),
    "not covering": (but(segments=GOOD.segments[:-1]), Reason.TOKEN_MISMATCH),
    "past the prompt": (with_segment(3, LiteralSegment(82, 4)), Reason.TOKEN_MISMATCH),
    "copy past the prompt": (
        but(segments=(*GOOD.segments, CopySegment(0, 0, 9, 85))),
        Reason.TOKEN_MISMATCH,
    ),
    "copy of other tokens": (with_segment(2, CopySegment(0, 49, 89, 42)), Reason.TOKEN_MISMATCH),
    "negative start": (with_segment(0, CopySegment(0, -40, 0, 0)), Reason.INVALID_EDIT),
    "negative dest": (with_segment(0, CopySegment(0, 0, 40, -1)), Reason.INVALID_EDIT),
    "reversed copy": (with_segment(0, CopySegment(0, 40, 0, 0)), Reason.INVALID_EDIT),
    "negative length": (with_segment(1, LiteralSegment(40, -2)), Reason.INVALID_EDIT),
    "past the source": (with_segment(2, CopySegment(0, 60, 100, 42)), Reason.INVALID_EDIT),
    "huge copy": (with_segment(2, CopySegment(0, 50, 2**70, 42)), Reason.INVALID_EDIT),
    "huge literal": (with_segment(3, LiteralSegment(82, 2**70)), Reason.TOKEN_MISMATCH),
    "source below zero": (with_segment(0, CopySegment(-1, 0, 40, 0)), Reason.INVALID_EDIT),
    "source above": (with_segment(0, CopySegment(1, 0, 40, 0)), Reason.INVALID_EDIT),
    "segments without source": (but(sources=(), directives=()), Reason.INVALID_EDIT),
    "directives without source": (but(sources=(), segments=()), Reason.INVALID_DIRECTIVE),
    "directive of no source": (
        but(directives=(Directive(1, 2, source=5),)),
        Reason.INVALID_DIRECTIVE,
    ),
    "directive below zero": (but(directives=(Directive(-3, 2),)), Reason.INVALID_DIRECTIVE),
    "directive past the end": (but(directives=(Directive(3, 91),)), Reason.INVALID_DIRECTIVE),
    "directives overlap": (
        but(directives=(Directive(3, 9), Directive(8, 10))),
        Reason.INVALID_DIRECTIVE,
    ),
    "directives out of order": (
        but(directives=(Directive(60, 62), Directive(40, 50))),
        Reason.INVALID_DIRECTIVE,
    ),
    "ten thousand directives": (
        but(directives=tuple(Directive(i, i) for i in range(10_000))),
        Reason.INVALID_DIRECTIVE,
    ),
    "too many directives": (
        but(directives=tuple(Directive(i, i) for i in range(1025))),
        Reason.INVALID_DIRECTIVE,
    ),
    "lineage unsorted": (
        but(lineage=(LineageRun(60, "a"), LineageRun(50, "b"))),
        Reason.INVALID_EDIT,
    ),
    "lineage twice at a place": (
        but(lineage=(LineageRun(60, "a"), LineageRun(60, "b"))),
        Reason.INVALID_EDIT,
    ),
    "source and prompt unrelated": (
        but(segments=(), directives=(Directive(1, 2),)),
        Reason.TOKEN_MISMATCH,
    ),
    "copy of what a directive removes": (
        but(directives=(Directive(40, 51),)),
        Reason.INVALID_EDIT,
    ),
    "sink beyond the prompt": (but(sink=10**9), Reason.NOTHING_TO_REUSE),
}


@pytest.mark.parametrize("name", CASES)
def test_bad_payload_is_served_as_if_there_were_none(name: str) -> None:
    """The reason is named; answer and cache are those of the same request without the edit."""
    payload, reason = CASES[name]
    engine, twin = make_engine(), make_engine()
    for one in (engine, twin):
        run(one, SOURCE, register("t1"))
    logits, record = run(engine, PROMPT, payload)
    assert (record.receipt.outcome, record.receipt.reason) == (Outcome.REPREFILLED, reason)
    assert record.receipt.lineage == ()
    assert record.receipt.tokens.spliced == 0
    assert {result.reason for result in record.receipt.directives} <= {reason}
    assert same_logits(logits, reference(PROMPT))
    run(twin, PROMPT, register("t2", session=payload.session, scope=payload.scope))
    assert snapshot(engine) == snapshot(twin)


def test_the_good_payload_is_spliced() -> None:
    """Control: what the cases above break is accepted unbroken."""
    engine = make_engine()
    run(engine, SOURCE, register("t1"))
    _, record = run(engine, PROMPT, GOOD)
    assert record.receipt.reason is Reason.SPLICED
    assert record.receipt.tokens.spliced == 40


def test_directives_alone_are_lowered_by_the_engine() -> None:
    """Without segments the directives of one source say it all."""
    engine = make_engine()
    run(engine, SOURCE, register("t1"))
    _, record = run(engine, PROMPT, but(segments=()))
    assert record.receipt.tokens.spliced == 40


def test_prompt_that_is_not_the_edited_source() -> None:
    """One wrong token in the prompt, inside a copy, refuses the edit."""
    engine = make_engine()
    run(engine, SOURCE, register("t1"))
    wrong = [*PROMPT[:60], PROMPT[60] % (VOCAB - 1) + 1, *PROMPT[61:]]
    logits, record = run(engine, wrong, GOOD)
    assert record.receipt.reason is Reason.TOKEN_MISMATCH
    assert same_logits(logits, reference(wrong))


def test_engine_that_does_not_splice_says_so() -> None:
    """With splicing off the edit is refused by name and the capability agrees."""
    engine = make_engine(splicing=False)
    run(engine, SOURCE, register("t1"))
    logits, record = run(engine, PROMPT, GOOD)
    assert record.receipt.reason is Reason.UNSUPPORTED_RUNTIME
    assert not engine.capability.splices
    assert engine.capability.unsupported_reason
    assert same_logits(logits, reference(PROMPT))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda p: msgspec.structs.replace(p, sources=(SourceRef("t1", 90, "x"),)),
        lambda p: msgspec.structs.replace(p, segments=p.segments[::-1]),
        lambda p: p,
    ],
)
def test_forget_is_obeyed_even_when_its_edit_is_refused(
    spoil: Callable[[EditPayload], EditPayload],
) -> None:
    """A malformed edit may cost a splice, but never leaves what was to be forgotten."""
    engine = make_engine()
    run(engine, SOURCE, register("t1"))
    slots = engine.cache.match(exact_keys(SOURCE)).slots[40:]
    prompt, payload = edit(SOURCE, [Directive(40, 50, (), Mode.FORGET)], tail=[9])
    logits, record = run(engine, prompt, spoil(payload))
    shared = next(i for i, (a, b) in enumerate(zip(SOURCE, prompt, strict=False)) if a != b)
    assert record.receipt.tokens.freed == 90 - shared
    assert engine.cache.match(exact_keys(SOURCE)).length == shared
    assert len(slots) == 50
    assert same_logits(logits, reference(prompt))
    assert retained(engine) == ["t2"]


def exact_keys(tokens: list[int]) -> array[int]:
    """Exact radix keys."""
    from leyline_engine.records.lineage import fold_keys

    return fold_keys(tokens, ())


def test_unsorted_lineage_without_an_edit() -> None:
    """A malformed lineage map is refused by name whether or not the turn was edited."""
    engine = make_engine()
    run(engine, SOURCE, register("t1"))
    runs = (LineageRun(50, "a"), LineageRun(20, "b"))
    payload = EditPayload(session="s", scope=SCOPE, turn="t2", lineage=runs)
    _, record = run(engine, [*SOURCE, 1], payload)
    assert record.receipt.reason is Reason.INVALID_EDIT


@pytest.mark.parametrize("forget", [(), ("m",), ("unheard of",)])
def test_a_lineage_that_begins_behind_the_prompt(forget: tuple[str, ...]) -> None:
    """It governs nothing: the last token is computed, and KV that wasn't forgotten is reused."""
    engine = make_engine()
    label = (SpanLabel("m", 80, 90),)
    run(engine, SOURCE, msgspec.structs.replace(register("t1"), spans=label))
    payload = msgspec.structs.replace(
        register("t2"), spans=label, lineage=(LineageRun(500, "l"),), forget=forget
    )
    logits, record = run(engine, SOURCE, payload)
    assert record.receipt.tokens.prefix == 89
    assert record.receipt.lineage == ()
    assert same_logits(logits, reference(SOURCE))


def test_lineage_name_that_is_no_text() -> None:
    """A lone surrogate, which JSON can carry, doesn't fail the request."""
    engine = make_engine()
    payload = EditPayload(session="s", scope=SCOPE, turn="t1", lineage=(LineageRun(50, "\ud800"),))
    logits, record = run(engine, SOURCE, payload)
    assert record.receipt.lineage == ()
    assert same_logits(logits, reference(SOURCE))


def test_repeated_payload_field_sources() -> None:
    """The same turn named twice doesn't lend a forgotten span's readers through its second name."""
    engine = make_engine()
    run(engine, SOURCE, register("t1"))
    directives = (Directive(10, 12), Directive(45, 50, (), Mode.FORGET))
    prompt, payload = edit(SOURCE, directives, tail=[9])
    twice = msgspec.structs.replace(
        payload,
        sources=(REF, REF),
        segments=tuple(
            msgspec.structs.replace(s, source=1) if isinstance(s, CopySegment) else s
            for s in payload.segments
        ),
    )
    _, record = run(engine, prompt, twice)
    # Copy [12, 45) lands at 10, of which the sink takes what lies below 32.
    assert record.receipt.tokens.spliced == 43 - 32
