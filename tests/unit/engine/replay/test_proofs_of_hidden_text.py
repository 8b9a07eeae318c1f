"""Proofs after splices: what rows remember, and what their visible tokens don't show."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import replace
from proof_kit import OTHER, TEXT, deep_engine, place_of, plant, proven, survivors
from support.replay_engine import (
    LIVE,
    SCOPE,
    cached,
    edit,
    random_tokens,
    register,
    run,
)

from leyline_engine.contract import Directive, EditPayload, SpanLabel
from leyline_engine.records.lineage import lineage_bits
from leyline_replay.engine import ReplayEngine

HEAD, SECRET, PUBLIC = random_tokens(34, 13), random_tokens(40, 11), random_tokens(40, 12)
CUT = Directive(len(HEAD), len(HEAD) + len(SECRET))

pytestmark = pytest.mark.damages


@pytest.fixture
def engine() -> ReplayEngine:
    """An engine of several layers."""
    return deep_engine(2000)


def labelled(payload: EditPayload, *lengths: int) -> EditPayload:
    """The payload of a prompt of messages with these lengths."""
    ends = [sum(lengths[: at + 1]) for at in range(len(lengths))]
    starts = [0, *ends[:-1]]
    spans = [SpanLabel(f"m{at}", *ends) for at, ends in enumerate(zip(starts, ends, strict=True))]
    return replace(payload, spans=tuple(spans))


def cuts(
    engine: ReplayEngine,
    session: str,
    hidden: list[int],
    *,
    share: str = "",
    more: Sequence[int] = (),
    tail: Sequence[int] = OTHER,
) -> tuple[list[int], list[int]]:
    """A session that cuts text out and adds some; its prompt, and the slots."""
    source = [*HEAD, *hidden, *TEXT, *more]
    first = replace(register("a1", session=session), share=share)
    run(engine, source, labelled(first, len(source)))
    prompt, payload = edit(source, [CUT], tail=tail, session=session, source_turn="a1", turn="a2")
    run(engine, prompt, labelled(replace(payload, share=share), len(prompt)))
    turn = engine.cache.registry.get((SCOPE, session), "a2")
    assert turn is not None
    return prompt, cached(engine, prompt, turn.lineage).tolist()


def test_hidden_text_makes_another_content(engine: ReplayEngine) -> None:
    """The same visible tokens after other hidden ones don't make a row another session's."""
    prompt, own = cuts(engine, "s", SECRET)
    same, others = cuts(engine, "q", PUBLIC)
    assert same == prompt
    for at in range(len(HEAD) + len(TEXT), len(prompt)):
        plant(engine, own[at], others[at])
    assert survivors(proven(engine))["pool.tree"] > len(OTHER) // 2


@pytest.mark.parametrize("share", ["", "team"])
def test_copies_of_own_text_are_not_lent(engine: ReplayEngine, share: str) -> None:
    """Not even when the rows that they are of have been evicted, or others share the lineage."""
    run(engine, OTHER, labelled(register("t1", session="z"), len(OTHER)))
    target = cached(engine, OTHER)
    _, own = cuts(engine, "s", SECRET, share=share)
    source = engine.cache.registry.get((SCOPE, "s"), "a1")
    assert source is not None
    engine.cache.lose(source.keys(), len(HEAD), "evicted")
    for at in range(20):
        plant(engine, own[len(HEAD) + 20 + at], int(target[30 + at]))
    assert survivors(proven(engine))["pool.tree"] == 20


def test_what_others_copied_under_a_shared_lineage_is_kept_with_them(
    engine: ReplayEngine,
) -> None:
    """Their copies go, for the lineage has read the session; the rows that they are of stay."""
    cuts(engine, "s", SECRET, share="team", tail=random_tokens(60, 51))
    cuts(engine, "q", PUBLIC, share="team", more=OTHER, tail=[3])
    proof = proven(engine)
    assert proof.complete and not proof.survivors
    assert place_of(proof, "pool.tree").kept == len(HEAD) + len(OTHER)


def test_what_a_lineage_that_has_read_the_session_remembers_is_found(
    engine: ReplayEngine,
) -> None:
    """The forget misses a lineage that another session computed after the text that it reused."""
    source = [*HEAD, *SECRET, *TEXT]
    run(engine, source, labelled(register("t1"), len(source)), reuse=LIVE)
    begin, after = random_tokens(40, 31), random_tokens(60, 14)
    first = [*begin, *TEXT, *after, 1]
    payload = labelled(register("a1", session="y"), 40, len(TEXT), 61)
    _, record = run(engine, first, payload, reuse=LIVE)
    assert record.receipt.tokens.reused
    cut = Directive(38, 41 + len(TEXT))
    prompt, payload = edit(first, [cut], tail=[9], session="y", source_turn="a1", turn="a2")
    run(engine, prompt, labelled(payload, len(prompt)))
    turn = engine.cache.registry.get((SCOPE, "y"), "a2")
    assert turn is not None
    missed = lineage_bits(turn.lineage[-1].lineage, SCOPE)
    whole = engine.cache._under_lineages
    engine.cache._under_lineages = lambda found: whole(  # type: ignore[method-assign]
        {bits: at for bits, at in found.items() if bits != missed}
    )
    proof = proven(engine)
    assert survivors(proof)["pool.tree"] > 50
    assert not place_of(proof, "pool.tree").kept
