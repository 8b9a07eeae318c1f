"""Reuse in the replay engine: who may take what, what a forget reaches, and when it gives way."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from support.replay_engine import (
    LIVE,
    OBSERVE,
    SCOPE,
    admit,
    cached,
    contents,
    edit,
    fail_at,
    make_engine,
    prefill,
    random_tokens,
    reference,
    register,
    retained,
    run,
    same_logits,
)

from leyline_engine.contract import (
    Directive,
    EditPayload,
    Mode,
    Outcome,
    Receipt,
    ReuseCounts,
    ReuseMode,
    ReusePayload,
    SpanLabel,
)
from leyline_replay.engine import ReplayEngine

DOC = random_tokens(150, 9)
FIRST = [*random_tokens(70, 1), 1, *DOC, 2, *random_tokens(20, 2)]
SECOND = [*random_tokens(60, 3), 3, *DOC, 4, *random_tokens(30, 4)]


def ask(
    engine: ReplayEngine,
    tokens: list[int],
    payload: EditPayload,
    reuse: ReusePayload | None = LIVE,
    decode: int = 0,
) -> Receipt:
    """The receipt of one request; its counts add up."""
    receipt = run(engine, tokens, payload, decode, reuse)[1].receipt
    counts = receipt.tokens
    assert counts.prefix + counts.spliced + counts.reused + counts.prefilled == len(tokens)
    if receipt.reuse is not None and receipt.reuse.mode is ReuseMode.LIVE:
        assert receipt.reuse.total == counts.reused
    return receipt


def prepared(pool: int = 2000, **options: Any) -> ReplayEngine:
    """An engine in which session ``a`` has the document."""
    engine = make_engine(pool=pool, **options)
    ask(engine, FIRST, register("t1", session="a"))
    return engine


def index_of(engine: ReplayEngine) -> Any:
    """The engine's index of content."""
    assert engine.cache.reuse is not None
    return engine.cache.reuse


def test_content_of_another_session_is_copied() -> None:
    """The document is found at another position, after another beginning; nothing was edited."""
    receipt = ask(prepared(), SECOND, register("t1", session="b"))
    assert receipt.outcome is Outcome.UNEDITED
    assert receipt.reuse == ReuseCounts(mode=ReuseMode.LIVE, tenant=150, extents=((61, 211),))
    assert [run_.start for run_ in receipt.lineage] == [61]


def test_without_the_action_nothing_is_looked_for() -> None:
    """Off is the default: nothing is counted, copied, or indexed."""
    engine = make_engine(pool=2000)
    ask(engine, FIRST, register("t1", session="a"), None)
    receipt = ask(engine, SECOND, register("t1", session="b"), None)
    assert receipt.reuse is None
    assert receipt.tokens.reused == 0
    assert len(index_of(engine)) == 0


def test_observing_counts_and_changes_nothing() -> None:
    """Logits are the model's own, and the tree holds what it holds without the question."""
    engine, plain = prepared(), prepared()
    logits, record = run(engine, SECOND, register("t1", session="b"), reuse=OBSERVE)
    run(plain, SECOND, register("t1", session="b"))
    assert record.receipt.reuse == ReuseCounts(mode=ReuseMode.OBSERVE, tenant=150)
    assert (record.receipt.tokens.reused, record.receipt.lineage) == (0, ())
    assert same_logits(logits, reference(SECOND))
    assert list(contents(engine).values()) == list(contents(plain).values())


@pytest.mark.parametrize("page", [1, 16, 64])
@pytest.mark.parametrize("boundary", [0, 20, 140])
def test_observing_foresees_what_live_copies(page: int, boundary: int) -> None:
    """A hit counts as far as it fills whole pages after its boundary."""
    counts = {}
    for mode in (OBSERVE, LIVE):
        engine = prepared(pool=2048, page=page)
        asked = msgspec.structs.replace(mode, boundary=boundary)
        receipt = ask(engine, SECOND, register("t1", session="b"), asked)
        assert receipt.reuse is not None
        counts[asked.mode] = receipt.reuse.total
    # The document is the prompt's tokens 61 to 211. With pages of 64, its end isn't cached.
    copied = {(1, 0): 150, (16, 0): 144, (64, 0): 64, (1, 20): 130, (16, 20): 112, (64, 20): 0}
    assert counts[ReuseMode.LIVE] == copied.get((page, boundary), 0)
    assert counts[ReuseMode.OBSERVE] == counts[ReuseMode.LIVE]


def test_other_tenants_see_nothing() -> None:
    """Another tenant's equal content is neither copied nor counted, and has slots of its own."""
    engine = prepared()
    theirs = cached(engine, FIRST)
    for mode in (OBSERVE, LIVE):
        receipt = ask(engine, SECOND, register("t1", session=f"b{mode.mode}", scope="else"), mode)
        assert receipt.reuse == ReuseCounts(mode=mode.mode)
    assert not set(theirs) & set(cached(engine, SECOND))


def test_a_clean_session_never_reads_what_was_reused() -> None:
    """A prompt that used foreign KV is private from there on, also where its tokens are equal."""
    engine = prepared()
    ask(engine, SECOND, register("t1", session="b"))
    logits, record = run(engine, [*SECOND, 7], register("t1", session="c"))
    assert record.receipt.tokens.prefix == 61
    assert same_logits(logits, reference([*SECOND, 7]))


def test_a_turn_goes_on_from_what_it_reused() -> None:
    """The session's next turn finds its own path, foreign part included, as a prefix."""
    engine = prepared()
    first = ask(engine, SECOND, register("t1", session="b"))
    payload = msgspec.structs.replace(register("t2", session="b"), lineage=first.lineage)
    receipt = ask(engine, [*SECOND, 7, 8], payload)
    assert (receipt.tokens.prefix, receipt.tokens.reused) == (len(SECOND), 0)


def test_nothing_is_shared_that_was_reused() -> None:
    """A scope within the tenant gets splices, but none that read another session's text."""
    engine = prepared()
    payload = msgspec.structs.replace(register("t1", session="b"), share="team")
    ask(engine, SECOND, payload)
    theirs = msgspec.structs.replace(register("t1", session="c"), share="team")
    assert ask(engine, [*SECOND, 7], theirs, None).tokens.prefix == 61


def test_edits_and_reuse_are_one_transaction() -> None:
    """Copies of an edit come first; only what they leave is looked for elsewhere."""
    engine = prepared()
    own = random_tokens(200, 5)
    run(engine, own, register("t1", session="b"))
    prompt, payload = edit(own, [Directive(50, 60, (3,))], tail=[9, *DOC, 5, 6], session="b")
    receipt = ask(engine, prompt, payload)
    assert (receipt.outcome, receipt.tokens.spliced) == (Outcome.SPLICED, 140)
    assert receipt.reuse == ReuseCounts(mode=ReuseMode.LIVE, tenant=150, extents=((192, 342),))


def test_own_content_elsewhere_is_the_sessions() -> None:
    """Content that the session itself held at another place is counted apart."""
    engine = prepared()
    receipt = ask(engine, SECOND, register("t2", session="a"))
    assert receipt.reuse == ReuseCounts(mode=ReuseMode.LIVE, session=150, extents=((61, 211),))


def test_evicted_content_is_not_found() -> None:
    """Evicted content leaves the index with its slots."""
    engine = prepared(pool=320)
    assert len(index_of(engine)) > 0
    ask(engine, random_tokens(300, 6), register("t1", session="x"), None)
    receipt = ask(engine, SECOND, register("t1", session="b"), OBSERVE)
    assert receipt.reuse == ReuseCounts(mode=ReuseMode.OBSERVE)


def test_a_turn_that_is_not_retained_is_not_indexed() -> None:
    """Content leaves the index with its turn, though its KV is still cached."""
    engine = prepared()
    engine.cache.registry.drop((SCOPE, "a"), "t1")
    assert len(cached(engine, FIRST)) == len(FIRST)
    assert len(index_of(engine)) == 0


LABELS = (SpanLabel("m0", 0, 71), SpanLabel("doc", 71, 222), SpanLabel("m2", 222, 242))


def labelled(turn: str = "t1", session: str = "a", **fields: Any) -> EditPayload:
    """A payload that names the parts of :data:`FIRST`."""
    return msgspec.structs.replace(register(turn, session=session), spans=LABELS, **fields)


@pytest.mark.parametrize("named", ["doc", "m0", "unknown"])
def test_a_forget_reaches_those_who_reused_it(named: str) -> None:
    """KV that was copied from a reader of the span is gone, and so is its place in the index."""
    engine = make_engine(pool=2000)
    run(engine, FIRST, labelled(), reuse=LIVE)
    reader = ask(engine, SECOND, register("t1", session="b"))
    assert reader.tokens.reused == 150
    runs = reader.lineage
    assert len(cached(engine, SECOND, runs)) == len(SECOND)
    forget = msgspec.structs.replace(register("t2", session="a"), forget=(named,))
    receipt = ask(engine, random_tokens(40, 7), forget)
    assert receipt.forgot is not None
    assert receipt.forgot.overwritten > 0
    assert len(cached(engine, SECOND, runs)) == 61
    assert retained(engine, "a") == ["t2"]
    again = ask(engine, [*random_tokens(50, 8), *DOC, 5], register("t1", session="c"), OBSERVE)
    assert again.reuse == ReuseCounts(mode=ReuseMode.OBSERVE)


@pytest.mark.parametrize("spans", [(), LABELS[:1], (LABELS[0], LABELS[2])])
def test_text_without_a_label_counts_as_read_by_its_copies(spans: tuple[SpanLabel, ...]) -> None:
    """If a source isn't labelled from end to end, any forget of its session reaches the copies."""
    engine = make_engine(pool=2000)
    payload = msgspec.structs.replace(register("t1", session="a"), spans=spans)
    run(engine, FIRST, payload, reuse=LIVE)
    reader = ask(engine, SECOND, register("t1", session="b"))
    assert reader.tokens.reused == 150
    forget = msgspec.structs.replace(register("t2", session="a"), forget=("unknown",))
    ask(engine, random_tokens(40, 7), forget)
    assert len(cached(engine, SECOND, reader.lineage)) == 61


def test_what_follows_from_reuse_is_not_shared_either() -> None:
    """A later splice of KV that reuse brought along stays private, whatever its turn declares."""
    engine = prepared()
    ask(engine, SECOND, register("t1", session="b"))
    prompt, payload = edit(SECOND, [Directive(215, 220)], tail=[9, 8], session="b")
    lineage = engine.cache.registry.turns((SCOPE, "b"))[0].lineage
    payload = msgspec.structs.replace(payload, share="team", lineage=lineage)
    assert ask(engine, prompt, payload, None).tokens.spliced > 0
    theirs = msgspec.structs.replace(register("t1", session="c"), share="team")
    logits, record = run(engine, [*prompt, 7], theirs)
    assert record.receipt.tokens.prefix == 61
    assert same_logits(logits, reference([*prompt, 7]))


def test_a_forget_reaches_copies_beside_an_edit() -> None:
    """In a plan that copies for both, what reuse brought along is found by its session's forget."""
    engine = make_engine(pool=2000)
    run(engine, FIRST, labelled(), reuse=LIVE)
    own = random_tokens(200, 5)
    run(engine, own, register("t1", session="b"))
    prompt, payload = edit(own, [Directive(50, 60, (3,))], tail=[9, *DOC, 5, 6], session="b")
    reader = ask(engine, prompt, payload)
    assert (reader.tokens.spliced, reader.tokens.reused) == (140, 150)
    forget = msgspec.structs.replace(register("t2", session="a"), forget=("doc",))
    ask(engine, random_tokens(40, 7), forget)
    assert len(cached(engine, prompt, reader.lineage)) <= 192


def test_an_engine_that_does_not_splice_reuses_nothing() -> None:
    """KV of a model that isn't on the allow-list can't be moved, for reuse neither."""
    engine = make_engine(pool=2000, splicing=False)
    ask(engine, FIRST, register("t1", session="a"))
    logits, record = run(engine, SECOND, register("t1", session="b"), reuse=LIVE)
    assert (record.receipt.reuse, record.receipt.tokens.reused) == (None, 0)
    assert same_logits(logits, reference(SECOND))


def test_a_request_that_forgets_reuses_nothing() -> None:
    """Its own demand is carried out first of all, and its prompt is computed."""
    engine = prepared()
    payload = msgspec.structs.replace(register("t1", session="b"), forget=("x",))
    receipt = ask(engine, SECOND, payload)
    assert (receipt.reuse, receipt.tokens.reused) == (None, 0)


def test_a_forget_directive_reuses_nothing() -> None:
    """Neither the text that it takes out, nor its readers, come back from another session."""
    engine = prepared()
    own = [*random_tokens(50, 5), *DOC, *random_tokens(80, 6)]
    run(engine, own, register("t1", session="b"))
    prompt, payload = edit(own, [Directive(60, 70, (), Mode.FORGET)], tail=[*DOC, 5], session="b")
    assert ask(engine, prompt, payload).tokens.reused == 0


def test_reuse_gives_way_to_the_prompt() -> None:
    """With no room for copies beside their locked sources, the request runs without them."""
    engine = prepared(pool=len(FIRST) + len(SECOND) + 8)
    assert ask(engine, SECOND, register("t1", session="b")).tokens.reused == 150
    tight = prepared(pool=len(FIRST) + len(SECOND) - 8)
    receipt = ask(tight, SECOND, register("t1", session="b"))
    assert receipt.outcome is Outcome.UNEDITED
    assert receipt.reuse == ReuseCounts(mode=ReuseMode.LIVE)


@pytest.mark.parametrize("call", [1, 2])
def test_a_failed_copy_costs_the_reuse_and_nothing_else(
    call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a copy fails, the request runs as without reuse, and nothing is left behind."""
    engine = prepared()
    pool = engine.cache.pool
    monkeypatch.setattr(pool, "copy", fail_at(pool.copy, call, RuntimeError("injected")))
    prompt = [*SECOND, *DOC, 5]
    logits, record = run(engine, prompt, register("t1", session="b"), reuse=LIVE)
    assert record.receipt.outcome is Outcome.UNEDITED
    assert record.receipt.tokens.reused == 0
    assert same_logits(logits, reference(prompt))


def test_a_failed_copy_for_reuse_leaves_the_edit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The edit is made again without what was reused."""
    engine = prepared()
    own = random_tokens(200, 5)
    run(engine, own, register("t1", session="b"))
    prompt, payload = edit(own, [Directive(50, 60, (3,))], tail=[9, *DOC, 5, 6], session="b")
    pool = engine.cache.pool
    monkeypatch.setattr(pool, "copy", fail_at(pool.copy, 2, RuntimeError("injected")))
    receipt = ask(engine, prompt, payload)
    assert (receipt.outcome, receipt.tokens.spliced, receipt.tokens.reused) == (
        Outcome.SPLICED,
        140,
        0,
    )


def test_a_boundary_is_computed() -> None:
    """The first tokens of what is reused are computed in their new context."""
    asked = ReusePayload(mode=ReuseMode.LIVE, boundary=16)
    receipt = ask(prepared(), SECOND, register("t1", session="b"), asked)
    assert receipt.tokens.reused == 134
    whole = ReusePayload(mode=ReuseMode.LIVE, boundary=149)
    assert ask(prepared(), SECOND, register("t1", session="b"), whole).tokens.reused == 0


def test_the_sink_is_never_copied() -> None:
    """Positions below the sink are computed, and a source's first tokens are copied nowhere."""
    engine = make_engine(pool=2000)
    ask(engine, DOC, register("t1", session="a"))
    receipt = ask(engine, [*random_tokens(10, 3), 3, *DOC, 4], register("t1", session="b"))
    assert receipt.tokens.reused == 150 - 32
    assert [run_.start for run_ in receipt.lineage] == [11 + 32]
    payload = msgspec.structs.replace(register("t1", session="c"), sink=100)
    prompt = [*random_tokens(20, 5), 3, *DOC, 4]
    observed = ask(engine, prompt, payload, OBSERVE).reuse
    assert observed == ReuseCounts(mode=ReuseMode.OBSERVE, tenant=21 + 150 - 100)


def test_a_running_reader_is_withheld_by_a_forget() -> None:
    """A request that is using the span while it is forgotten publishes nothing."""
    engine = make_engine(pool=2000)
    run(engine, FIRST, labelled(), reuse=LIVE)
    reader = admit(engine, SECOND, register("t1", session="b"), reuse=LIVE)
    assert reader.receipt.tokens.reused == 150
    forget = msgspec.structs.replace(register("t2", session="a"), forget=("doc",))
    ask(engine, random_tokens(40, 7), forget)
    prefill(reader)
    record = reader.finish()
    engine.check_integrity()
    assert record.receipt.turn == ""
    assert len(cached(engine, SECOND, record.receipt.lineage)) <= 61
    assert engine.cache.ledger.hidden_spans((SCOPE, "a")) == frozenset()


def test_a_prompt_is_found_while_its_answer_is_generated() -> None:
    """Agents that start together find one another's content; entries go with an aborted turn."""
    engine = make_engine(pool=2000)
    run(engine, random_tokens(40, 5), register("t0", session="a"), reuse=LIVE)
    first = admit(engine, FIRST, register("t1", session="a"), reuse=LIVE)
    assert first.prefill_step() is None
    asked = [*random_tokens(50, 8), *DOC, 5]
    assert ask(engine, asked, register("t1", session="c"), OBSERVE).tokens.reused == 0
    prefill(first)
    assert ask(engine, SECOND, register("t1", session="b")).tokens.reused == 150
    engine.cache.registry.drop((SCOPE, "b"), "t1")
    engine.cache.registry.drop((SCOPE, "c"), "t1")
    first.abort()
    engine.check_integrity()
    again = ask(engine, [*random_tokens(55, 9), *DOC, 5], register("t1", session="d"), OBSERVE)
    assert again.reuse == ReuseCounts(mode=ReuseMode.OBSERVE)


def test_a_withheld_prompt_is_not_found() -> None:
    """Prompts of running turns leave the index with the forget that reaches them."""
    engine = make_engine(pool=2000)
    run(engine, random_tokens(40, 5), register("t0", session="a"), reuse=LIVE)
    first = admit(engine, FIRST, labelled(), reuse=LIVE)
    prefill(first)
    assert "a" in indexed_sessions(engine)
    forget = msgspec.structs.replace(register("t2", session="a"), forget=("m2",))
    ask(engine, random_tokens(40, 7), forget, None)
    assert ask(engine, SECOND, register("t1", session="b")).tokens.reused == 0
    engine.cache.registry.drop((SCOPE, "a"), "t2")
    assert indexed_sessions(engine) == {"b"}
    first.finish()
    engine.check_integrity()
    assert indexed_sessions(engine) == {"b"}


def indexed_sessions(engine: ReplayEngine) -> set[str]:
    """Sessions to whose turns entries of the index lead."""
    tenants = index_of(engine)._tenants.values()
    return {entry.path.source.session for tenant in tenants for entry in tenant.entries.values()}
