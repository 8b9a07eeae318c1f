"""Drawing on several turns, several turns back, again and again."""

from __future__ import annotations

import torch
from support.replay_engine import (
    SCOPE,
    admit,
    edit,
    ids,
    make_engine,
    random_tokens,
    reference,
    register,
    run,
    same_logits,
)

from leyline_engine.contract import (
    CopySegment,
    Directive,
    EditPayload,
    LiteralSegment,
    Outcome,
    Reason,
    SourceRef,
    token_digest,
)
from leyline_engine.records.lineage import fold_keys
from leyline_engine.records.sources import SourceRegistry, SourceTurn

ONE, TWO = random_tokens(90, 21), random_tokens(80, 22)


def ref(turn: str, tokens: list[int]) -> SourceRef:
    """A reference to a retained turn."""
    return SourceRef(turn, len(tokens), token_digest(tokens))


def test_one_prompt_from_two_turns() -> None:
    """Each copy takes values from its own source, and the prompt's own head stays exact."""
    engine = make_engine(pool=900)
    run(engine, ONE, register("t1"))
    run(engine, TWO, register("t2"))
    prompt = [*ONE[:40], 5, *TWO[30:60], 6, *ONE[50:90], 7]
    payload = EditPayload(
        session="s",
        scope=SCOPE,
        turn="t3",
        sources=(ref("t2", TWO), ref("t1", ONE)),
        segments=(
            CopySegment(1, 0, 40, 0),
            LiteralSegment(40, 1),
            CopySegment(0, 30, 60, 41),
            LiteralSegment(71, 1),
            CopySegment(1, 50, 90, 72),
            LiteralSegment(112, 1),
        ),
    )
    _, record = run(engine, prompt, payload)
    tokens = record.receipt.tokens
    assert (tokens.prefix, tokens.spliced, tokens.prefilled) == (40, 70, 3)
    found = engine.cache.match(fold_keys(prompt, record.receipt.lineage, SCOPE)).slots
    pool = engine.cache.pool
    for source, begin, end, dest in ((TWO, 30, 60, 41), (ONE, 50, 90, 72)):
        origin = engine.cache.match(fold_keys(source, ())).slots[begin:end]
        assert torch.equal(
            pool.read(1, found[dest : dest + end - begin])[1], pool.read(1, origin)[1]
        )


def test_a_turn_further_back_is_a_source() -> None:
    """After turns that went elsewhere, an earlier one is still edited."""
    engine = make_engine(pool=900)
    run(engine, ONE, register("t1"))
    for number in range(2, 6):
        run(engine, random_tokens(60, number), register(f"t{number}"))
    prompt, payload = edit(ONE, [Directive(40, 45)], tail=[9], turn="t9")
    _, record = run(engine, prompt, payload)
    assert record.receipt.tokens.spliced == 45


def test_repeated_edits_keep_the_first_values() -> None:
    """Ten cuts, one a turn, leave the KV that one edit with all ten cuts leaves."""
    source = random_tokens(140, 23)
    chained, at_once = make_engine(pool=3000), make_engine(pool=3000)
    tokens = source
    _, record = run(chained, tokens, register("t0"))
    for number in range(10):
        tokens, payload = edit(
            tokens,
            [Directive(40, 43)],
            source_turn=f"t{number}",
            turn=f"t{number + 1}",
            lineage=record.receipt.lineage,
        )
        _, record = run(chained, tokens, payload)
        assert record.receipt.outcome is Outcome.SPLICED
    run(at_once, source, register("t1"))
    prompt, payload = edit(source, [Directive(40, 70)])
    _, single = run(at_once, prompt, payload)
    assert prompt == tokens
    ends = []
    for engine, receipt in ((chained, record.receipt), (at_once, single.receipt)):
        slots = engine.cache.match(fold_keys(prompt, receipt.lineage, SCOPE)).slots
        ends.append(engine.cache.pool.read(0, slots[40:-1]))
    assert torch.equal(ends[0][0], ends[1][0])
    assert torch.equal(ends[0][1], ends[1][1])


def test_generated_tokens_belong_to_the_source() -> None:
    """The output is part of the turn, the last token too though no KV exists for it."""
    engine = make_engine()
    _, record = run(engine, ONE, register("t1"), decode=4)
    assert len(record.output_ids) == 5
    whole = [*ONE, *record.output_ids]
    prompt, payload = edit(whole, [Directive(40, 50)], tail=[3])
    _, spliced = run(engine, prompt, payload)
    # The answer's last token has no KV in the source, so it is prefilled with the new one.
    assert spliced.receipt.tokens.prefilled == 2


def test_unfinished_and_aborted_turns_are_no_sources() -> None:
    """Only a finished turn can be named."""
    engine = make_engine()
    running = admit(engine, ONE, register("t1"))
    prompt, payload = edit(ONE, [Directive(40, 50)], tail=[3])
    for _ in range(2):
        answer, record = run(engine, prompt, payload)
        assert record.receipt.reason is Reason.MISSING_SOURCE
        assert same_logits(answer, reference(prompt))
        if not running.ended:
            running.abort()


def source(name: str) -> SourceTurn:
    """A turn by name."""
    return SourceTurn(name, ids([1]), "d", (), SCOPE)


def test_a_turn_that_is_named_again_stays_as_it_was() -> None:
    """A replayed request changes no source that a later edit may name, and no count of tokens."""
    registry = SourceRegistry(max_turns=2)
    first = SourceTurn("t1", ids([1, 2, 3]), "d", (), SCOPE)
    for turn in (first, source("t2"), SourceTurn("t1", ids([9]), "e", (), SCOPE)):
        registry.retain(("x", "a"), turn)
    assert registry.get(("x", "a"), "t1") is first
    assert (registry.count(), registry.token_count) == (2, 4)
    registry.retain(("x", "a"), source("t3"))
    assert [turn.turn for turn in registry.turns(("x", "a"))] == ["t1", "t3"]
    assert registry.token_count == 4


def test_registry_is_bounded() -> None:
    """Old turns and idle sessions make way; the one in use stays."""
    registry = SourceRegistry(max_sessions=2, max_turns=2)
    for name in ("t1", "t2", "t1", "t3"):
        registry.retain(("x", "a"), source(name))
    kept = [name for name in ("t1", "t2", "t3") if registry.get(("x", "a"), name)]
    assert kept == ["t1", "t3"]
    registry.retain(("x", "b"), source("t1"))
    assert registry.get(("x", "a"), "t1") is not None
    registry.retain(("y", "a"), source("t1"))
    assert registry.get(("x", "b"), "t1") is None
    assert registry.get(("x", "a"), "t3") is not None
    for turn in registry.turns(("x", "a")):
        registry.drop(("x", "a"), turn.turn)
    assert registry.get(("x", "a"), "t3") is None
    assert registry.get(("y", "a"), "t1") is not None
