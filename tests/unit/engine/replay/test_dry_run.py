"""The cache without a model finds what the engine finds."""

from __future__ import annotations

from array import array

import msgspec
import pytest
from support.replay_engine import edit, make_engine, random_tokens, register, run

from leyline_engine.contract import Directive, EditPayload, Mode, ReuseMode, ReusePayload
from leyline_replay.dry_run import DryCache, Found

DOC, OTHER = random_tokens(150, 9), random_tokens(120, 10)
FIRST = [*random_tokens(70, 1), *DOC, *random_tokens(40, 2)]
SECOND = [*random_tokens(60, 3), *OTHER, *DOC, *random_tokens(30, 4)]
THIRD = [*FIRST[:100], *random_tokens(50, 5), *OTHER]
CUT = Directive(80, 110, (7, 8, 9))


def _traffic() -> list[tuple[list[int], EditPayload]]:
    """Three sessions that share content, one of them edited, continued, and made to forget."""
    edited, payload = edit(FIRST, [CUT], tail=random_tokens(60, 6), session="a")
    going_on = [*edited, *random_tokens(90, 7), *OTHER]
    gone = msgspec.structs.replace(CUT, mode=Mode.FORGET)
    forgotten, demand = edit(SECOND, [gone], tail=DOC, session="b")
    return [
        (FIRST, register("t1", session="a")),
        (SECOND, register("t1", session="b")),
        (edited, payload),
        (going_on, register("t3", session="a")),
        (THIRD, register("t1", session="c")),
        (forgotten, demand),
        (going_on, register("t4", session="c")),
    ]


@pytest.mark.parametrize("mode", list(ReuseMode))
@pytest.mark.parametrize("pool", [4000, 700])
def test_counts_are_the_engines(mode: ReuseMode, pool: int) -> None:
    """Prefix, edits and reuse by kind are those in the receipts of an engine of equal size."""
    engine, dry = make_engine(pool=pool), DryCache(tokens=pool)
    asked = ReusePayload(mode=mode)
    theirs: dict[str, tuple[object, object]] = {}
    seen: list[Found] = []
    for prompt, payload in _traffic():
        for_engine, for_dry = payload, payload
        if payload.session in theirs and payload.turn == "t3":
            before, ours = theirs[payload.session]
            for_engine = msgspec.structs.replace(payload, lineage=before)
            for_dry = msgspec.structs.replace(payload, lineage=ours)
        # What is edited later has no answer, so that its directives end with the prompt.
        decode = 0 if prompt in (FIRST, SECOND) else 2
        record = run(engine, prompt, for_engine, decode=decode, reuse=asked)[1]
        found = dry.serve(array("q", prompt), array("q", record.output_ids), for_dry, asked)
        receipt = record.receipt
        assert (found.prefix, found.edits) == (receipt.tokens.prefix, receipt.tokens.spliced)
        assert found.reuse == receipt.reuse
        assert [one.start for one in found.lineage] == [one.start for one in receipt.lineage]
        theirs[payload.session] = receipt.lineage, found.lineage
        seen.append(found)
    if pool == 4000:  # the traffic shows all of them
        assert seen[3].prefix > len(FIRST)
        assert any(one.edits for one in seen)
        assert any(one.reuse is not None and one.reuse.tenant for one in seen)


def test_a_cache_without_a_bound_keeps_everything() -> None:
    """However much comes between, a prompt is found again but for its last token."""
    dry = DryCache()
    long = array("q", [number % 50_000 for number in range(150_000)])
    for turn in range(3):
        prompt = array("q", [60_000 + turn, *long])
        dry.serve(prompt, array("q"), register("t1", session=f"s{turn}"))
    again = dry.serve(array("q", [60_000, *long]), array("q"), register("t1", session="z"))
    assert again.prefix == len(long)


def test_a_prompt_that_does_not_fit_is_not_kept() -> None:
    """It finds nothing, and says that it is no source for later turns."""
    dry = DryCache(tokens=50)
    found = dry.serve(array("q", FIRST), array("q"), register("t1"))
    assert found == Found(retained=False)
