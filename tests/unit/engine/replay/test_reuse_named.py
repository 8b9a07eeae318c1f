"""Reuse by name in the replay engine: places that the proxy names need no index, and are hints."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from support.replay_engine import (
    admit,
    cached,
    contents,
    edit,
    ids,
    make_engine,
    prefill,
    random_tokens,
    reference,
    register,
    run,
    same_logits,
)

from leyline_engine.contract import (
    CopySegment,
    Directive,
    EnvelopeError,
    Outcome,
    Reason,
    Receipt,
    ReuseCounts,
    ReuseMode,
    ReusePayload,
    SourceRef,
    SpanLabel,
    edit_envelope,
    split_actions,
    token_digest,
)
from leyline_engine.reuse.fingerprints import MatcherKind
from leyline_replay.engine import ReplayEngine

SHORT = random_tokens(40, 8)
DOC = random_tokens(150, 9)
FIRST = [*random_tokens(70, 1), 1, *SHORT, 2, *DOC, 3, *random_tokens(20, 2)]
SECOND = [*random_tokens(60, 3), 4, *SHORT, 5, *DOC, 6, *random_tokens(30, 4)]
SHORT_AT, DOC_AT = (71, 61), (112, 102)
"""Places in the first prompt and in the second."""
LABELS = (
    SpanLabel("m0", 0, 71),
    SpanLabel("short", 71, 112),
    SpanLabel("doc", 112, 263),
    SpanLabel("m3", 263, 283),
)
OURS = SourceRef("t1", len(FIRST), token_digest(ids(FIRST)), "a")


def named(
    source: SourceRef = OURS, mode: ReuseMode = ReuseMode.LIVE, **fields: Any
) -> ReusePayload:
    """The request for reuse of a prompt like :data:`SECOND`, with both places."""
    copies = (
        CopySegment(0, SHORT_AT[0], SHORT_AT[0] + len(SHORT), SHORT_AT[1]),
        CopySegment(0, DOC_AT[0], DOC_AT[0] + len(DOC), DOC_AT[1]),
    )
    return ReusePayload(mode=mode, sources=(source,), copies=copies, **fields)


def prepared(matcher: MatcherKind = MatcherKind.OFF, **options: Any) -> ReplayEngine:
    """An engine in which session ``a`` has both texts; it finds nothing by itself."""
    engine = make_engine(pool=2000, matcher=matcher, **options)
    payload = msgspec.structs.replace(register("t1", session="a"), spans=LABELS)
    run(engine, FIRST, payload, reuse=ReusePayload(mode=ReuseMode.LIVE))
    return engine


def ask(
    engine: ReplayEngine, reuse: ReusePayload, tokens: list[int] = SECOND, **fields: Any
) -> Receipt:
    """The receipt of session ``b``; its counts add up."""
    payload = msgspec.structs.replace(register("t1", session="b"), **fields)
    receipt = run(engine, tokens, payload, reuse=reuse)[1].receipt
    counts = receipt.tokens
    assert counts.prefix + counts.spliced + counts.reused + counts.prefilled == len(tokens)
    return receipt


def test_named_content_is_copied_without_an_index() -> None:
    """A short and a long text of another session are found by their places alone."""
    engine = prepared()
    plain = ask(engine, ReusePayload(mode=ReuseMode.OBSERVE))
    assert plain.reuse == ReuseCounts(mode=ReuseMode.OBSERVE)
    assert engine.cache.reuse is not None
    assert len(engine.cache.reuse) == 0
    engine = prepared()
    receipt = ask(engine, named())
    assert receipt.outcome is Outcome.UNEDITED
    assert receipt.reuse == ReuseCounts(
        mode=ReuseMode.LIVE, tenant=190, extents=((61, 101), (102, 252))
    )
    assert [each.start for each in receipt.lineage] == [61]


def test_names_and_search_complete_each_other() -> None:
    """The search alone misses the short text; beside a name, it covers what isn't named."""
    tokens = named().copies
    searched = ask(prepared(MatcherKind.WINNOW), ReusePayload(mode=ReuseMode.LIVE))
    assert searched.reuse == ReuseCounts(mode=ReuseMode.LIVE, tenant=150, extents=((102, 252),))
    one = msgspec.structs.replace(named(), copies=tokens[:1])
    assert ask(prepared(), one).tokens.reused == 40
    for asked in (one, named()):
        both = ask(prepared(MatcherKind.WINNOW), asked)
        assert both.reuse == ReuseCounts(
            mode=ReuseMode.LIVE, tenant=190, extents=((61, 101), (102, 252))
        )


def test_observing_counts_names_and_changes_nothing() -> None:
    """Logits are the model's own, and slots hold what they hold without the question."""
    engine, plain = prepared(), prepared()
    payload = register("t1", session="b")
    logits, record = run(engine, SECOND, payload, reuse=named(mode=ReuseMode.OBSERVE))
    run(plain, SECOND, payload)
    assert record.receipt.reuse == ReuseCounts(mode=ReuseMode.OBSERVE, tenant=190)
    assert (record.receipt.tokens.reused, record.receipt.lineage) == (0, ())
    assert same_logits(logits, reference(SECOND))
    assert list(contents(engine).values()) == list(contents(plain).values())


@pytest.mark.parametrize(
    "source",
    [
        SourceRef("t9", OURS.length, OURS.digest, "a"),
        SourceRef("t1", OURS.length - 1, OURS.digest, "a"),
        SourceRef("t1", OURS.length, token_digest(ids(SECOND)), "a"),
        SourceRef("t1", OURS.length, OURS.digest, "nobody"),
        SourceRef("t1", OURS.length, OURS.digest),
    ],
    ids=["turn", "length", "digest", "session", "own"],
)
def test_a_wrong_source_is_left_out(source: SourceRef) -> None:
    """The request is served plainly, as an ordinary prefill, and nothing is counted as reused."""
    engine = prepared()
    logits, record = run(engine, SECOND, register("t1", session="b"), reuse=named(source))
    assert record.receipt.outcome is Outcome.UNEDITED
    assert record.receipt.reuse == ReuseCounts(mode=ReuseMode.LIVE)
    assert same_logits(logits, reference(SECOND))


def test_another_tenants_turn_has_no_name() -> None:
    """A source is always of the request's own scope, whatever it is called."""
    receipt = ask(prepared(), named(), scope="else")
    assert receipt.reuse == ReuseCounts(mode=ReuseMode.LIVE)


def test_ids_that_differ_are_never_copied() -> None:
    """A misplaced or changed text costs a comparison; what agrees beside it is copied."""
    engine = prepared()
    changed = [*SECOND]
    changed[DOC_AT[1] + 70] = (changed[DOC_AT[1] + 70] + 1) % 200 + 1
    receipt = ask(engine, named(), changed)
    assert receipt.tokens.reused == 40 + 149
    shifted = [7, *SECOND]
    logits, record = run(engine, shifted, register("t1", session="c"), reuse=named())
    assert record.receipt.reuse == ReuseCounts(mode=ReuseMode.LIVE)
    assert same_logits(logits, reference(shifted))


def test_an_edit_names_no_other_session() -> None:
    """Edits are of the session's own turns: such an edit is refused, and the prompt prefilled."""
    engine = prepared()
    prompt, payload = edit(FIRST, [Directive(80, 90)], tail=[9], session="b")
    other = tuple(msgspec.structs.replace(ref, session="a") for ref in payload.sources)
    payload = msgspec.structs.replace(payload, sources=other)
    receipt = run(engine, prompt, payload)[1].receipt
    assert (receipt.outcome, receipt.reason) == (Outcome.REPREFILLED, Reason.INVALID_EDIT)


def test_an_edits_copies_come_first() -> None:
    """A name adds nothing to what an edit copies already; it serves the rest of the prompt."""
    engine = prepared()
    own = [*random_tokens(60, 5), *DOC]
    run(engine, own, register("t0", session="b"))
    prompt, payload = edit(
        own, [Directive(40, 50, (3,))], tail=[9, *SHORT, 5], source_turn="t0", session="b"
    )
    at = prompt.index(9, len(own) - 10) + 1
    copies = (
        CopySegment(0, DOC_AT[0], DOC_AT[0] + len(DOC), 51),
        CopySegment(0, SHORT_AT[0], SHORT_AT[0] + len(SHORT), at),
    )
    receipt = run(engine, prompt, payload, reuse=msgspec.structs.replace(named(), copies=copies))[1]
    assert receipt.receipt.tokens.spliced == 160
    assert receipt.receipt.tokens.reused == 40


def test_a_turn_that_forgets_reuses_no_names() -> None:
    """Its demand is carried out first of all, and its prompt is computed."""
    receipt = ask(prepared(), named(), forget=("x",))
    assert (receipt.reuse, receipt.tokens.reused) == (None, 0)


@pytest.mark.parametrize("span", ["doc", "m0", "unknown"])
def test_a_forget_reaches_those_who_named_it(span: str) -> None:
    """Copies by name are in the ledger: a forget in the named session takes them, too."""
    engine = prepared()
    reader = ask(engine, named())
    assert reader.tokens.reused == 190
    assert len(cached(engine, SECOND, reader.lineage)) == len(SECOND)
    forget = msgspec.structs.replace(register("t2", session="a"), forget=(span,))
    receipt = run(engine, random_tokens(40, 7), forget)[1].receipt
    assert receipt.forgot is not None
    assert receipt.forgot.overwritten > 0
    assert len(cached(engine, SECOND, reader.lineage)) <= 102
    again = run(engine, SECOND, register("t1", session="c"), reuse=named())[1].receipt
    assert again.reuse == ReuseCounts(mode=ReuseMode.LIVE)


def test_evicted_content_has_no_place() -> None:
    """Of a source whose KV is partly gone, only what is cached is copied."""
    engine = make_engine(pool=len(FIRST) + 70, matcher=MatcherKind.OFF)
    run(engine, FIRST, register("t1", session="a"))
    run(engine, random_tokens(120, 6), register("t1", session="x"))
    left = len(cached(engine, FIRST))
    assert left < DOC_AT[0]
    sequence = admit(engine, SECOND[:130], register("t1", session="b"), reuse=named())
    prefill(sequence)
    assert sequence.finish().receipt.tokens.reused <= max(0, left - SHORT_AT[0])


def test_the_hints_of_a_request_are_bounded() -> None:
    """More sources or copies than the contract has room for are no payload at all."""
    for fields in ({"sources": (OURS,) * 17}, {"copies": named().copies * 129}):
        asked = ReusePayload(mode=ReuseMode.LIVE, **fields)
        with pytest.raises(EnvelopeError, match="length"):
            split_actions(edit_envelope("m", register("t1"), reuse=asked))
    assert split_actions(edit_envelope("m", register("t1"), reuse=named())).reuse == named()
