"""Equal tokens with different pasts: whose a spliced KV is, and who finds its readers."""

from __future__ import annotations

import msgspec
import numpy as np
import torch
from support.replay_engine import (
    SCOPE,
    admit,
    blank,
    cached,
    edit,
    make_engine,
    random_tokens,
    register,
    run,
    same_logits,
)

from leyline_engine.contract import Directive, EditPayload, LineageRun, SpanLabel
from leyline_replay.engine import ReplayEngine

STEM, REST = random_tokens(60, 3), random_tokens(120, 4)


def cut_twice(
    engine: ReplayEngine, session: str, removed: list[int]
) -> tuple[torch.Tensor, tuple[LineageRun, ...]]:
    """Cut a session's own text, cut before it, and continue: the last logits and lineage.

    The tokens of all turns but the first are the same, whatever was removed.
    """
    source = [*STEM, *removed, *REST]
    run(engine, source, register("t1", session=session))
    first, payload = edit(source, [Directive(60, 60 + len(removed))], tail=[9], session=session)
    _, record = run(engine, first, payload)
    again, payload = edit(
        first,
        [Directive(40, 45)],
        tail=[8],
        source_turn="t2",
        turn="t3",
        session=session,
        lineage=record.receipt.lineage,
    )
    _, record = run(engine, again, payload)
    assert (record.receipt.tokens.prefix, record.receipt.lineage[0].start) == (40, 40)
    more = EditPayload(session=session, scope=SCOPE, turn="t4", lineage=record.receipt.lineage)
    logits, last = run(engine, [*again, 7], more)
    assert last.receipt.tokens.prefix == len(again)
    return logits, last.receipt.lineage


def test_the_same_edit_of_different_pasts_makes_two_lineages() -> None:
    """Two sessions whose tokens are equal since they cut different texts never share spliced KV."""
    one, two = random_tokens(20, 5), random_tokens(20, 6)
    together, alone = make_engine(pool=2000), make_engine(pool=2000)
    _, lineage = cut_twice(together, "a", one)
    beside, other = cut_twice(together, "b", two)
    expected, _ = cut_twice(alone, "b", two)
    assert lineage != other
    assert same_logits(beside, expected)
    assert not same_logits(cut_twice(make_engine(pool=2000), "a", one)[0], expected)


def test_a_forget_finds_readers_behind_an_edit_between_two_cuts() -> None:
    """An edit that continues with the KV before a cut still knows the readers of the text cut
    there."""
    engine = make_engine(pool=2000)
    source = random_tokens(200, 3)
    labels = (
        SpanLabel("m1", 0, 60),
        SpanLabel("first", 60, 80),
        SpanLabel("m3", 80, 120),
        SpanLabel("second", 120, 140),
        SpanLabel("m5", 140, 200),
    )
    run(engine, source, msgspec.structs.replace(register("t1"), spans=labels))
    cut, payload = edit(source, [Directive(60, 80), Directive(120, 140)], tail=[9])
    left = (SpanLabel("m1", 0, 60), SpanLabel("m3", 60, 100), SpanLabel("m5", 100, len(cut)))
    _, record = run(engine, cut, msgspec.structs.replace(payload, spans=left))
    between, payload = edit(
        cut,
        [Directive(80, 85)],
        tail=[8],
        source_turn="t2",
        turn="t3",
        lineage=record.receipt.lineage,
    )
    left = (SpanLabel("m1", 0, 60), SpanLabel("m3", 60, 95), SpanLabel("m5", 95, len(between)))
    _, record = run(engine, between, msgspec.structs.replace(payload, spans=left))
    assert (record.receipt.tokens.prefix, len(record.receipt.lineage)) == (80, 2)
    asked = EditPayload(
        session="s",
        scope=SCOPE,
        turn="t4",
        lineage=record.receipt.lineage,
        spans=(*left, SpanLabel("m6", len(between), len(between) + 1)),
        forget=("second",),
    )
    readers = cached(engine, between, record.receipt.lineage)[95:]
    sequence = admit(engine, [*between, 5], asked)
    # m5 was after the second cut; the KV moved from between the two never read it.
    assert sequence.receipt.tokens.prefix == 95
    assert len(readers) == len(between) - 95
    assert blank(engine, np.setdiff1d(readers, sequence.owned))
    sequence.abort()
    engine.check_integrity()
