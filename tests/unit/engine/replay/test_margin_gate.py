"""The margin gate of the replay engine: what it undoes, what it leaves, and when it holds back."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from support.replay_engine import (
    LIVE,
    OBSERVE,
    SCOPE,
    admit,
    blank,
    cached,
    contents,
    edit,
    fail_at,
    free_slots,
    held,
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
    Outcome,
    ReuseCounts,
    ReuseMode,
    ReusePayload,
    SpanLabel,
    TokenCounts,
)
from leyline_replay.engine import ReplayEngine
from leyline_replay.sequence import Sequence as Running

DOC = random_tokens(150, 9)
FIRST = [*random_tokens(70, 1), 1, *DOC, 2, *random_tokens(20, 2)]
SECOND = [*random_tokens(60, 3), 3, *DOC, 4, *random_tokens(30, 4)]
STRICT = ReusePayload(mode=ReuseMode.LIVE, margin=100)
"""No prefill of the tiny model is trusted."""
LABELS = (SpanLabel("m0", 0, 71), SpanLabel("doc", 71, 222), SpanLabel("m2", 222, 242))


def prepared(pool: int = 2000, **fields: Any) -> ReplayEngine:
    """An engine in which session ``a`` has the document."""
    engine = make_engine(pool=pool)
    run(engine, FIRST, msgspec.structs.replace(register("t1", session="a"), **fields), reuse=LIVE)
    return engine


def margin_of(logits: torch.Tensor) -> float:
    """The likeliest token's logit minus the second's, computed apart from the engine."""
    ranked = sorted(logits.tolist(), reverse=True)
    return float(ranked[0] - ranked[1])


def answer(engine: ReplayEngine, running: Running) -> tuple[torch.Tensor, list[int]]:
    """First logits and a few greedy tokens of a request that was admitted."""
    first = logits = prefill(running)
    for _ in range(4):
        logits = running.decode_step(int(logits.argmax()))
    output = running.output_ids
    running.finish(int(logits.argmax()))
    engine.check_integrity()
    return first, output


@pytest.mark.parametrize("prompt", [SECOND, [*SECOND, *DOC, 5]])
def test_a_gated_request_answers_like_a_plain_one(prompt: list[int]) -> None:
    """Logits and tokens are those of a request that never asked, to the last bit."""
    plain = answer(engine := prepared(), admit(engine, prompt, register("t1", session="b")))
    engine = prepared()
    running = admit(engine, prompt, register("t1", session="b"), reuse=STRICT)
    before = running.receipt.tokens
    assert before.reused >= 150
    gated = answer(engine, running)
    assert torch.equal(gated[0], plain[0])
    assert gated[1] == plain[1]
    receipt = running.receipt
    assert receipt.tokens == TokenCounts(len(prompt), 0, 0, 0, len(prompt))
    assert receipt.reuse is not None
    assert receipt.reuse.gated
    assert (receipt.outcome, receipt.lineage) == (Outcome.UNEDITED, ())
    reusing = prefill(admit(engine := prepared(), prompt, register("t1", session="b"), reuse=LIVE))
    assert not torch.equal(reusing, plain[0]), "control: reuse changes the logits"
    assert receipt.reuse.margin == pytest.approx(margin_of(reusing))


def test_a_margin_at_the_threshold_is_trusted() -> None:
    """Only a smaller one is not; the receipt has what was measured, and counts the reuse."""
    reusing, _ = run(prepared(), SECOND, register("t1", session="b"), reuse=LIVE)
    margin = margin_of(reusing)
    for threshold, gated in ((margin * 0.99, False), (margin * 1.01, True)):
        asked = ReusePayload(mode=ReuseMode.LIVE, margin=threshold)
        receipt = run(prepared(), SECOND, register("t1", session="b"), reuse=asked)[1].receipt
        assert receipt.reuse is not None
        assert receipt.reuse.margin == pytest.approx(margin)
        assert (receipt.reuse.gated, receipt.tokens.reused) == (gated, 0 if gated else 150)


def test_nothing_is_measured_without_a_gate_or_without_copies() -> None:
    """A threshold of 0, a prompt of which nothing is found, and mode observe have no margin."""
    engine = prepared()
    live = run(engine, SECOND, register("t1", session="b"), reuse=LIVE)[1].receipt.reuse
    assert live == ReuseCounts(mode=ReuseMode.LIVE, tenant=150, extents=((61, 211),))
    new = run(engine, random_tokens(50, 8), register("t1", session="c"), reuse=STRICT)[1]
    assert new.receipt.reuse == ReuseCounts(mode=ReuseMode.LIVE)
    strict = msgspec.structs.replace(OBSERVE, margin=100)
    observed = run(engine, SECOND, register("t1", session="d"), reuse=strict)[1].receipt.reuse
    assert observed == ReuseCounts(mode=ReuseMode.OBSERVE, tenant=180)


def test_nothing_of_an_undone_prefill_stays() -> None:
    """Tree, locks, slots and turns are as after a request that never asked."""
    engine, plain = prepared(), prepared()
    run(plain, SECOND, register("t1", session="b"), 2)
    running = admit(engine, SECOND, register("t1", session="b"), reuse=STRICT)
    foreign = running.receipt.lineage
    logits = prefill(running)
    engine.check_integrity()
    for _ in range(2):
        logits = running.decode_step(int(logits.argmax()))
    running.finish(int(logits.argmax()))
    engine.check_integrity()
    assert len(cached(engine, SECOND, foreign)) == 61, "the exact beginning alone"
    assert len(free_slots(engine)) == len(free_slots(plain))
    assert engine.cache.tree.cached_count() == plain.cache.tree.cached_count()
    assert not engine.cache.tree.doomed()
    assert engine.cache.ledger.hidden_spans((SCOPE, "b")) == frozenset()
    assert (retained(engine, "b"), engine.stats().in_flight) == (["t1"], 0)
    assert (turn := engine.cache.registry.get((SCOPE, "b"), "t1")) is not None
    assert turn.lineage == ()


def test_what_was_computed_plainly_is_everybodys() -> None:
    """A gated prompt has no lineage, so its session and others find it as a prefix."""
    engine = prepared()
    run(engine, SECOND, register("t1", session="b"), reuse=STRICT)
    receipt = run(engine, [*SECOND, 7], register("t1", session="c"))[1].receipt
    assert receipt.tokens.prefix == len(SECOND)


def test_an_edit_stays_when_reuse_is_given_up() -> None:
    """Copies for the edit are made again, and answers are those of the edit alone."""
    own = random_tokens(200, 5)
    prompt, payload = edit(own, [Directive(50, 60, (3,))], tail=[9, *DOC, 5, 6], session="b")

    def edited(reuse: ReusePayload | None) -> tuple[torch.Tensor, Any]:
        engine = prepared()
        run(engine, own, register("t1", session="b"))
        return run(engine, prompt, payload, 1, reuse)

    alone, plain = edited(None)
    logits, record = edited(STRICT)
    assert torch.equal(logits, alone)
    assert (record.receipt.outcome, record.receipt.tokens.spliced) == (Outcome.SPLICED, 140)
    assert record.receipt.tokens == plain.receipt.tokens
    assert record.receipt.lineage != ()
    assert record.receipt.reuse.gated


def test_what_was_cached_meanwhile_is_found() -> None:
    """The prefix is looked for again, so a gated request takes what others published since."""
    engine = prepared()
    running = admit(engine, SECOND, register("t1", session="b"), reuse=STRICT)
    run(engine, SECOND[:200], register("t1", session="c"))
    logits = prefill(running)
    record = running.finish()
    engine.check_integrity()
    assert record.receipt.tokens == TokenCounts(len(SECOND), 200, 0, 0, len(SECOND) - 200)
    assert same_logits(logits, reference(SECOND))


@pytest.mark.parametrize("when", ["before", "between"])
def test_a_forget_between_the_prefills_withholds_both(when: str) -> None:
    """A session's forget reaches its request that runs, on either side of the gate: it stays out
    of the tree, and the forget is pending until the second prefill's slots are overwritten."""
    engine = prepared()
    running = admit(engine, SECOND, register("t1", session="b"), reuse=STRICT)
    assert len(running.pending) > 1
    if when == "between":
        while running.receipt.reuse is not None and not running.receipt.reuse.gated:
            running.prefill_step()
        assert running.pending
    whole = msgspec.structs.replace(register("t2", session="b"), forget=("anything",))
    ticket = admit(engine, random_tokens(40, 7), whole)
    prefill(ticket)
    ticket.finish()
    prefill(running)
    assert running.receipt.reuse is not None
    assert running.receipt.reuse.gated
    engine.check_integrity()
    news = engine.settled_forgets().get(ticket.receipt.message_id)
    assert news is None or news.pending > 0
    record = running.finish()
    engine.check_integrity()
    assert record.receipt.turn == ""
    assert len(cached(engine, SECOND)) == 0
    assert engine.settled_forgets()[ticket.receipt.message_id].pending == 0
    assert retained(engine, "b") == ["t2"]


def test_slots_that_a_withheld_request_gives_up_are_overwritten() -> None:
    """A second prefill that needs fewer slots leaves none behind with what the first one read."""
    engine = prepared()
    running = admit(engine, SECOND, register("t1", session="b"), reuse=STRICT)
    running.prefill_step()
    whole = msgspec.structs.replace(register("t2", session="b"), forget=("anything",))
    run(engine, random_tokens(40, 7), whole)
    run(engine, SECOND[:200], register("t1", session="c"))
    owned = len(running.owned)
    prefill(running)
    assert len(running.owned) < owned
    running.finish()
    engine.check_integrity()
    assert blank(engine, free_slots(engine))


def test_a_forget_of_what_was_copied_withholds_what_is_computed_after() -> None:
    """The copies' readers are struck before the gate acts: the request still publishes nothing."""
    engine = prepared(spans=LABELS)
    running = admit(engine, SECOND, register("t1", session="b"), reuse=STRICT)
    forget = msgspec.structs.replace(register("t2", session="a"), forget=("doc",))
    run(engine, random_tokens(40, 7), forget)
    prefill(running)
    record = running.finish()
    engine.check_integrity()
    assert record.receipt.turn == ""
    assert len(cached(engine, SECOND)) == 0
    assert not engine.cache.pool.left().size, "all that was given back is overwritten"


def test_a_second_prefill_needs_no_more_slots_than_the_first() -> None:
    """In a pool without a free slot, the gate still acts, and evicts nothing."""
    tight = prepared(pool=len(FIRST) + len(SECOND))
    running = admit(tight, SECOND, register("t1", session="b"), room=0, reuse=STRICT)
    assert tight.cache.free_count == 0
    kept = cached(tight, FIRST).tolist()
    prefill(running)
    record = running.finish()
    tight.check_integrity()
    assert record.receipt.reuse == msgspec.structs.replace(
        record.receipt.reuse, gated=True, tenant=0
    )
    assert cached(tight, FIRST).tolist() == kept


def test_a_request_that_finds_no_room_keeps_its_first_result() -> None:
    """When the prefix that it stood on was lost and the pool is full, reuse is served, and the
    receipt says that it was."""
    pool = 700
    engine = prepared(pool=pool)
    head = random_tokens(80, 6)
    run(engine, head, register("t1", session="h"))
    prompt = [*head, *SECOND]
    running = admit(engine, prompt, register("t1", session="b"), room=0, reuse=STRICT)
    assert running.owned_from == len(head)
    run(
        engine,
        random_tokens(20, 7),
        msgspec.structs.replace(register("t2", session="h"), forget=("anything",)),
    )
    filler = admit(engine, random_tokens(engine.cache.free_count + 241, 8), room=0)
    assert engine.cache.free_count < len(head)
    logits = prefill(running)
    assert running.receipt.reuse is not None
    assert running.receipt.reuse.margin == pytest.approx(margin_of(logits))
    assert (running.receipt.reuse.gated, running.receipt.tokens.reused) == (False, 150)
    running.finish()
    filler.abort()
    engine.check_integrity()


def test_a_failure_while_undoing_ends_the_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the second admission raises, the request can be aborted, and nothing of it is left."""
    engine, twin = prepared(), prepared()
    running = admit(engine, SECOND, register("t1", session="b"), reuse=STRICT)
    with monkeypatch.context() as broken:
        match = fail_at(engine.cache.match, 1, RuntimeError("injected"))
        broken.setattr(engine.cache, "match", match)
        with pytest.raises(RuntimeError, match="injected"):
            prefill(running)
    running.abort()
    engine.check_integrity()
    assert held(engine) == held(twin)
    assert set(contents(engine)) == set(contents(twin))


def test_a_request_that_is_aborted_anywhere_gives_everything_back() -> None:
    """Before, between and after the two prefills, an abort leaves no slot and no lock behind."""
    total = 0
    running = admit(engine := prepared(), SECOND, register("t1", session="b"), reuse=STRICT)
    while running.prefill_step() is None:
        total += 1
    running.finish()
    assert total >= 10, "control: both prefills have several steps"
    for stop in range(total + 1):
        engine, before = prepared(), held(prepared())
        running = admit(engine, SECOND, register("t1", session="b"), reuse=STRICT)
        for _ in range(stop):
            running.prefill_step()
        running.abort()
        engine.check_integrity()
        assert held(engine) == before
