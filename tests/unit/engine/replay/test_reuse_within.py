"""Reuse in given extents, and of a session's own turns alone, in the replay engine."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.replay_engine import (
    admit,
    cached,
    contents,
    fail_at,
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
    EditPayload,
    Receipt,
    ReuseCounts,
    ReuseMode,
    ReusePayload,
    SourceRef,
    SpanLabel,
    token_digest,
)
from leyline_engine.reuse.fingerprints import MatcherKind
from leyline_replay.engine import ReplayEngine
from leyline_replay.sequence import Sequence

Extents = tuple[tuple[int, int], ...]

DOC, NOTE = random_tokens(150, 9), random_tokens(100, 10)
FIRST = [*random_tokens(70, 1), 1, *DOC, 2, *NOTE, 5]
LABELS = (SpanLabel("m0", 0, 71), SpanLabel("doc", 71, 222), SpanLabel("rest", 222, len(FIRST)))
AGAIN = [*random_tokens(60, 3), 3, *DOC, 4, *NOTE, 6, *random_tokens(30, 4)]
"""A prompt with both texts at other positions."""
LATER = [*random_tokens(60, 13), *AGAIN[60:]]
"""The same after another beginning, so that no prefix of it is cached."""
DOC_AT, NOTE_AT = (61, 211), (212, 312)
INDEX = ReusePayload(mode=ReuseMode.LIVE, within=())


def recall(within: Extents | None = (DOC_AT,), *, own: bool = True, **fields: Any) -> ReusePayload:
    """The request for own KV in extents."""
    return ReusePayload(mode=ReuseMode.LIVE, within=within, own=own, **fields)


def turn(session: str, name: str, **fields: Any) -> EditPayload:
    """The payload of a turn that edits nothing."""
    return msgspec.structs.replace(register(name, session=session), **fields)


def prepared(session: str = "a", **options: Any) -> ReplayEngine:
    """An engine in which a session of a tenant without general reuse has both texts."""
    engine = make_engine(pool=4000, **options)
    run(engine, FIRST, turn(session, "t1", spans=LABELS), reuse=INDEX)
    return engine


def ask(
    engine: ReplayEngine,
    reuse: ReusePayload | None,
    session: str = "a",
    name: str = "t2",
    tokens: list[int] = AGAIN,
    **fields: Any,
) -> Receipt:
    """The receipt of one request; its counts add up, and its extents cover what was reused."""
    receipt = run(engine, tokens, turn(session, name, **fields), reuse=reuse)[1].receipt
    counts = receipt.tokens
    assert counts.prefix + counts.spliced + counts.reused + counts.prefilled == len(tokens)
    found = receipt.reuse
    if found is not None:
        assert found.total == counts.reused == sum(end - start for start, end in found.extents)
    return receipt


def named(holder: str = "", within: Extents | None = (DOC_AT,), *, own: bool = True) -> Any:
    """A request that names both texts in the first turn of a session."""
    source = SourceRef("t1", len(FIRST), token_digest(ids(FIRST)), holder)
    copies = (CopySegment(0, 71, 221, DOC_AT[0]), CopySegment(0, 222, 322, NOTE_AT[0]))
    return recall(within, own=own, sources=(source,), copies=copies)


def test_no_extent_makes_turns_known_and_looks_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The turn runs as without the action, no search is made, and its content can be recalled."""
    engine, plain = make_engine(pool=4000), make_engine(pool=4000)
    for each in (engine, plain):
        run(each, NOTE, turn("a", "t0"), reuse=INDEX if each is engine else None)
    reuse = engine._admitter._reuse
    with monkeypatch.context() as patch:
        patch.setattr(reuse, "_found", fail_at(reuse._found, 1, AssertionError("a search")))
        logits, record = run(engine, FIRST, turn("a", "t1"), reuse=INDEX)
    expected, unasked = run(plain, FIRST, turn("a", "t1"))
    assert record.receipt.reuse is None
    assert record.receipt.tokens == unasked.receipt.tokens
    assert torch.equal(logits, expected)
    assert list(contents(engine).values()) == list(contents(plain).values())
    assert engine.cache.reuse is not None
    assert plain.cache.reuse is not None
    assert (len(engine.cache.reuse) > 10, len(plain.cache.reuse)) == (True, 0)
    assert ask(engine, recall()).tokens.reused == 150
    assert ask(plain, recall()).tokens.reused == 0, "control: it was never indexed"


@pytest.mark.parametrize("ask_for", [recall, named])
@pytest.mark.parametrize(
    ("within", "copied"),
    [
        ((DOC_AT,), (DOC_AT,)),
        (((100, 180),), ((100, 180),)),
        (((0, 90), (90, 100), (205, 240)), ((61, 100), (212, 240))),
        (((196, 228),), ((212, 228),)),
        (((196, 227),), ()),
        (((330, 9000),), ()),
        (None, (DOC_AT, NOTE_AT)),
    ],
)
def test_nothing_outside_the_extents_is_copied(
    ask_for: Any, within: Extents | None, copied: Extents
) -> None:
    """Found and named content is cut at the edges; pieces below 16 tokens are prefilled."""
    matcher = MatcherKind.OFF if ask_for is named else MatcherKind.WINNOW
    receipt = ask(prepared(matcher=matcher), ask_for(within=within))
    total = sum(end - start for start, end in copied)
    assert receipt.reuse == ReuseCounts(mode=ReuseMode.LIVE, session=total, extents=copied)
    assert [each.start for each in receipt.lineage] == [start for start, _ in copied[:1]]


def test_a_boundary_is_computed_inside_the_extents() -> None:
    """The first tokens of a recalled run are no part of what the receipt says was copied."""
    receipt = ask(prepared(), recall(((80, 200),), boundary=8))
    assert receipt.reuse == ReuseCounts(mode=ReuseMode.LIVE, session=112, extents=((88, 200),))


@pytest.mark.parametrize("holder", ["", "a"])
def test_another_sessions_text_is_never_copied_as_own(holder: str) -> None:
    """Neither found nor named; without ``own``, the same request takes it."""
    whole = (0, len(AGAIN))
    for asked in (recall((whole,)), named(holder, (whole,))):
        assert ask(prepared(), asked, "b").reuse == ReuseCounts(mode=ReuseMode.LIVE)
        control = msgspec.structs.replace(asked, own=False)
        assert ask(prepared(), control, "b").reuse == ReuseCounts(
            mode=ReuseMode.LIVE, tenant=250, extents=(DOC_AT, NOTE_AT)
        )


def test_a_group_gives_nothing_to_a_request_for_own_text() -> None:
    """Another tenant's content stays there, though both declare a group; a control takes it."""
    engine = make_engine(pool=4000)
    theirs = msgspec.structs.replace(INDEX, groups=("docs",))
    run(engine, FIRST, turn("a", "t1", scope="else"), reuse=theirs)
    assert ask(engine, recall(groups=("docs",)), "b").tokens.reused == 0
    assert ask(engine, recall(own=False, groups=("docs",)), "c", tokens=LATER).tokens.reused == 150


def test_own_text_in_shared_kv_is_own() -> None:
    """The index has a shared beginning under the first session; the second recalls it as its own,
    a third one that never had it doesn't."""
    engine = prepared("first")
    assert ask(engine, INDEX, "a", "t1", [*FIRST, 8]).tokens.prefix == len(FIRST)
    assert ask(engine, recall(), "third", "t1").tokens.reused == 0
    receipt = ask(engine, recall(), tokens=LATER)
    assert receipt.reuse == ReuseCounts(mode=ReuseMode.LIVE, session=150, extents=(DOC_AT,))


def forget(engine: ReplayEngine, span: str, session: str = "a") -> None:
    """Let a session forget a span."""
    receipt = run(engine, random_tokens(40, 7), turn(session, "t8", forget=(span,)))[1].receipt
    assert receipt.forgot is not None


@pytest.mark.parametrize("span", ["doc", "m0", "unknown"])
@pytest.mark.parametrize("asked", [recall(), named()])
def test_forgotten_text_is_never_recalled(span: str, asked: ReusePayload) -> None:
    """A recall after the forget copies nothing of it, though another session still has its own."""
    engine = prepared()
    other = [*random_tokens(50, 6), 7, *DOC, 8]
    ask(engine, INDEX, "z", "t1", other)
    assert ask(prepared(), asked).tokens.reused == 150, "control: before the forget, it does"
    forget(engine, span)
    logits, record = run(engine, AGAIN, turn("a", "t9"), reuse=asked)
    assert record.receipt.tokens.reused == 0
    assert record.receipt.lineage == ()
    assert same_logits(logits, reference(AGAIN))
    anyones = ask(engine, msgspec.structs.replace(asked, own=False), "b", tokens=LATER)
    assert anyones.reuse is not None
    assert anyones.reuse.tenant == 150, "control: the other session's text is there"


def test_text_that_another_session_keeps_after_a_forget_is_no_longer_own() -> None:
    """The KV was shared, and stays for the other session; the one that forgot finds it no more."""
    engine = prepared("first")
    run(engine, FIRST, turn("a", "t1", spans=LABELS), reuse=INDEX)
    forget(engine, "doc")
    assert len(cached(engine, FIRST)) == len(FIRST), "the first session has it still"
    assert ask(engine, recall()).tokens.reused == 0
    assert ask(engine, recall(), "first", "t9", LATER).tokens.reused == 150


@pytest.mark.parametrize("span", ["doc", "m0"])
def test_a_forget_reaches_recalled_copies(span: str) -> None:
    """Copies are in the ledger: what they have read can't be forgotten without them."""
    engine = prepared()
    receipt = ask(engine, recall())
    assert len(cached(engine, AGAIN, receipt.lineage)) == len(AGAIN)
    forget(engine, span)
    assert len(cached(engine, AGAIN, receipt.lineage)) <= DOC_AT[0]


def test_a_recall_that_fails_or_is_gated_reports_no_extent() -> None:
    """Nothing was copied in the end, so nothing is reported; the answer is the model's own."""
    engine = prepared()
    engine.cache.copy = fail_at(engine.cache.copy, 1, RuntimeError("a copy"))  # type: ignore[method-assign]
    logits, record = run(engine, AGAIN, turn("a", "t2"), reuse=recall())
    assert record.receipt.reuse == ReuseCounts(mode=ReuseMode.LIVE)
    assert same_logits(logits, reference(AGAIN))
    gated = ask(prepared(), recall(margin=100.0)).reuse
    assert gated is not None
    assert (gated.gated, gated.extents) == (True, ())
    trusted = ask(prepared(), recall(margin=1e-6)).reuse
    assert trusted is not None
    assert (trusted.gated, trusted.extents) == (False, (DOC_AT,))


def moved(engine: ReplayEngine, sequence: Sequence) -> Extents:
    """Positions whose slots hold keys that were computed for others, by the pool's own record."""
    at = engine.cache.pool._computed_at[torch.from_numpy(sequence.held.astype("int64"))]
    found: list[tuple[int, int]] = []
    for position in range(len(at)):
        if int(at[position]) == position:
            continue
        if found and found[-1][1] == position:
            found[-1] = (found[-1][0], position + 1)
        else:
            found.append((position, position + 1))
    return tuple(found)


@settings(max_examples=examples(25), deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 20))
def test_receipts_equal_the_pools_own_record(seed: int, boundary: int) -> None:
    """The extents are the positions whose keys were moved there, all of them inside ``within``."""
    rng = random.Random(seed)
    engine = prepared()
    parts = [random_tokens(rng.randint(1, 40), rng.randrange(999)) for _ in range(4)]
    pieces = [DOC[rng.randrange(40) :], NOTE[: rng.randint(64, 100)], DOC[:90]]
    rng.shuffle(pieces)
    # Longer than the session's turn before any text: no text stays where it was.
    tokens = random_tokens(340, rng.randrange(999))
    for part, piece in zip(parts, pieces, strict=False):
        tokens += [*part, *piece]
    tokens += parts[-1]
    cuts = sorted(rng.sample(range(300, len(tokens)), 6))
    within = tuple(zip(cuts[::2], cuts[1::2], strict=True))
    sequence = admit(engine, tokens, turn("a", "t2"), reuse=recall(within, boundary=boundary))
    prefill(sequence)
    counts = sequence.receipt.reuse
    assert counts is not None
    assert counts.extents == moved(engine, sequence)
    allowed = {at for start, end in within for at in range(start, end)}
    assert all(set(range(start, end)) <= allowed for start, end in counts.extents)
    sequence.finish()


def test_an_engine_says_that_it_keeps_to_extents() -> None:
    """The capability says so if, and only if, the engine copies at all."""
    assert make_engine().capability.reuse_within
    assert not make_engine(splicing=False).capability.reuse_within
