"""Reuse between tenants: only in a group that both declare, and within reach of every forget."""

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
    edit,
    make_engine,
    prefill,
    random_tokens,
    reference,
    register,
    run,
    same_logits,
)

from leyline_engine.contract import (
    Directive,
    EditPayload,
    Receipt,
    ReuseCounts,
    ReuseMode,
    ReusePayload,
    SpanLabel,
)
from leyline_engine.records.lineage import fold_keys
from leyline_replay.engine import ReplayEngine

OTHER, THIRD = "other", "third"
DOC, NEXT = random_tokens(150, 9), random_tokens(100, 10)
FIRST = [*random_tokens(70, 1), 1, *DOC, 2, *random_tokens(20, 2)]
SECOND = [*random_tokens(60, 3), 3, *DOC, 4, *random_tokens(30, 4)]
LABELS = (SpanLabel("m0", 0, 71), SpanLabel("doc", 71, 222), SpanLabel("m2", 222, 242))


def live(*groups: str) -> ReusePayload:
    """A request for reuse in some groups."""
    return ReusePayload(mode=ReuseMode.LIVE, groups=groups)


DOCS = live("docs")


def turn(scope: str, session: str = "s", name: str = "t1", **fields: Any) -> EditPayload:
    """The payload of a tenant's turn."""
    return msgspec.structs.replace(register(name, session=session), scope=scope, **fields)


def ask(
    engine: ReplayEngine, tokens: list[int], payload: EditPayload, reuse: ReusePayload | None
) -> Receipt:
    """The receipt of one request; its counts add up."""
    receipt = run(engine, tokens, payload, 0, reuse)[1].receipt
    counts = receipt.tokens
    assert counts.prefix + counts.spliced + counts.reused + counts.prefilled == len(tokens)
    return receipt


def prepared(reuse: ReusePayload = DOCS, labels: tuple[SpanLabel, ...] = LABELS) -> ReplayEngine:
    """An engine in which the first tenant has the document."""
    engine = make_engine(pool=4000)
    ask(engine, FIRST, turn(SCOPE, spans=labels), reuse)
    return engine


def own_cached(engine: ReplayEngine, tokens: list[int], receipt: Receipt, scope: str) -> int:
    """The cached length of a tenant's path."""
    keys = fold_keys(tokens, receipt.lineage, scope)
    return len(engine.cache.tree.peek(keys))


@pytest.mark.parametrize(
    ("theirs", "ours", "found"),
    [
        (DOCS, DOCS, 150),
        (live("a", "docs"), live("docs", "b"), 150),
        (DOCS, live("else"), 0),
        (DOCS, LIVE, 0),
        (LIVE, DOCS, 0),
        (LIVE, LIVE, 0),
    ],
)
def test_content_is_taken_only_in_a_group_of_both(
    theirs: ReusePayload, ours: ReusePayload, found: int
) -> None:
    """Another tenant's document is found if one group is declared by its turn and by ours."""
    engine = prepared(theirs)
    seen = msgspec.structs.replace(ours, mode=ReuseMode.OBSERVE)
    counted = ask(engine, SECOND, turn(OTHER), seen).reuse
    assert counted == ReuseCounts(mode=ReuseMode.OBSERVE, group=found)
    engine = prepared(theirs)
    receipt = ask(engine, SECOND, turn(OTHER), ours)
    assert receipt.reuse == ReuseCounts(
        mode=ReuseMode.LIVE, group=found, extents=((61, 211),) if found else ()
    )
    assert receipt.tokens.reused == found


def test_own_content_is_preferred() -> None:
    """Content that the tenant has itself is not taken from another one."""
    engine = prepared()
    ask(engine, [*random_tokens(90, 6), *DOC, 7], turn(OTHER, "u"), LIVE)
    assert ask(engine, SECOND, turn(OTHER), DOCS).reuse == ReuseCounts(
        mode=ReuseMode.LIVE, tenant=150, extents=((61, 211),)
    )


@pytest.mark.parametrize("scope", [SCOPE, OTHER, THIRD])
@pytest.mark.parametrize("named", [True, False])
def test_what_was_taken_is_private_to_the_taker(scope: str, named: bool) -> None:
    """Neither the giver nor another session reads it, even if it names the taker's lineage."""
    engine = prepared()
    taken = ask(engine, SECOND, turn(OTHER), DOCS)
    assert taken.tokens.reused == 150
    claimed = taken.lineage if named and scope != OTHER else ()
    logits, record = run(engine, [*SECOND, 7], turn(scope, "clean", lineage=claimed))
    assert record.receipt.tokens.prefix == 61
    assert same_logits(logits, reference([*SECOND, 7]))


def test_kv_that_read_only_what_the_group_has_is_passed_on() -> None:
    """A third tenant takes a document that the second computed after one of the first's."""
    engine = prepared()
    both = [*SECOND, *NEXT, 6]
    assert ask(engine, both, turn(OTHER), DOCS).tokens.reused == 150
    third = ask(engine, [*random_tokens(50, 7), 3, *NEXT, 8], turn(THIRD), DOCS)
    assert third.reuse == ReuseCounts(mode=ReuseMode.LIVE, group=100, extents=((51, 151),))
    assert ask(engine, [*random_tokens(40, 8), *NEXT, 8], turn(THIRD, "u"), live("x")).reuse == (
        ReuseCounts(mode=ReuseMode.LIVE, tenant=100, extents=((40, 140),))
    )


def test_kv_after_an_edit_is_offered_to_nobody() -> None:
    """It remembers what its tenant has taken out of the prompt."""
    engine = make_engine(pool=4000)
    ask(engine, FIRST, turn(SCOPE), DOCS)
    prompt, payload = edit(FIRST, [Directive(40, 50)], tail=[*NEXT, 5, 6], session="s")
    assert ask(engine, prompt, msgspec.structs.replace(payload, scope=SCOPE), DOCS).tokens.spliced
    engine.cache.registry.drop((SCOPE, "s"), "t1")
    for wanted in (DOC, NEXT):
        asked = [*random_tokens(50, 7), 3, *wanted, 8]
        seen = ask(engine, asked, turn(OTHER), msgspec.structs.replace(OBSERVE, groups=("docs",)))
        assert seen.reuse == ReuseCounts(mode=ReuseMode.OBSERVE)


def test_kv_after_an_edit_beside_a_taken_document_is_offered_to_nobody() -> None:
    """A plan that copies for both keeps what the tenant took out of its own prompt."""
    engine = prepared()
    own = random_tokens(200, 5)
    run(engine, own, turn(OTHER), reuse=DOCS)
    prompt, payload = edit(own, [Directive(50, 60, (3,))], tail=[9, *DOC, 5, *NEXT, 6], session="s")
    both = ask(engine, prompt, msgspec.structs.replace(payload, scope=OTHER), DOCS).tokens
    assert (both.spliced, both.reused) == (140, 150)
    third = ask(engine, [*random_tokens(50, 7), 3, *NEXT, 8], turn(THIRD), DOCS)
    assert third.tokens.reused == 0


def test_kv_that_read_what_the_group_lacks_is_not_passed_on() -> None:
    """A group's turn that took a document outside of the group keeps what it computed after it."""
    engine = make_engine(pool=4000)
    ask(engine, FIRST, turn(OTHER, "u"), LIVE)
    assert ask(engine, [*SECOND, *NEXT, 6], turn(OTHER), DOCS).reuse == ReuseCounts(
        mode=ReuseMode.LIVE, tenant=150, extents=((61, 211),)
    )
    for wanted in (DOC, NEXT):
        third = ask(engine, [*random_tokens(50, 7), 3, *wanted, 8], turn(THIRD), DOCS)
        assert third.tokens.reused == 0
        engine.cache.registry.drop((THIRD, "s"), "t1")


@pytest.mark.parametrize("named", ["doc", "m0", "unknown"])
@pytest.mark.parametrize("labels", [LABELS, ()])
def test_a_forget_reaches_the_other_tenants_copies(
    named: str, labels: tuple[SpanLabel, ...]
) -> None:
    """Copies of the giver's KV go, the taker's and the third's; what they sent before stays."""
    engine = prepared(labels=labels)
    both = [*SECOND, *NEXT, 6]
    taken = ask(engine, both, turn(OTHER), DOCS)
    asked = [*random_tokens(50, 7), 3, *NEXT, 8]
    third = ask(engine, asked, turn(THIRD), DOCS)
    assert (taken.tokens.reused, third.tokens.reused) == (150, 100)
    forget = turn(SCOPE, name="t2", forget=(named,))
    receipt = ask(engine, random_tokens(40, 7), forget, None)
    assert receipt.forgot is not None
    assert receipt.forgot.overwritten > 0
    assert own_cached(engine, both, taken, OTHER) == 61
    assert own_cached(engine, asked, third, THIRD) == 51
    again = ask(engine, [*random_tokens(45, 8), *DOC, 5], turn(THIRD, "u"), DOCS)
    assert again.tokens.reused == 0


@pytest.mark.parametrize("labels", [LABELS, ()])
def test_a_forget_of_a_stranger_leaves_the_copies(labels: tuple[SpanLabel, ...]) -> None:
    """A tenant that gave nothing reaches nobody's copies, labelled or not."""
    engine = prepared(labels=labels)
    taken = ask(engine, SECOND, turn(OTHER), DOCS)
    ask(engine, [*random_tokens(30, 6), *NEXT], turn(THIRD), DOCS)
    ask(engine, random_tokens(40, 7), turn(THIRD, name="t2", forget=("doc",)), None)
    assert own_cached(engine, SECOND, taken, OTHER) == len(SECOND)


def test_a_running_turn_after_a_taken_document_is_withheld_by_a_forget() -> None:
    """It copies nothing itself, and continues a lineage that has read the span."""
    engine = prepared()
    taken = ask(engine, SECOND, turn(OTHER), DOCS)
    reader = admit(engine, [*SECOND, 7, 8], turn(OTHER, name="t2", lineage=taken.lineage))
    assert reader.receipt.tokens.prefix == len(SECOND)
    ask(engine, random_tokens(40, 7), turn(SCOPE, name="t2", forget=("doc",)), None)
    assert not reader.publishable
    prefill(reader)
    assert reader.finish().receipt.turn == ""
    engine.check_integrity()


def test_a_forget_of_the_taker_leaves_the_giver_alone() -> None:
    """A span of equal name in another tenant's session is another span."""
    engine = prepared()
    own = (SpanLabel("m0", 0, 61), SpanLabel("doc", 61, 212), SpanLabel("m2", 212, 242))
    taken = ask(engine, SECOND, turn(OTHER, spans=own), DOCS)
    ask(engine, random_tokens(40, 7), turn(OTHER, name="t2", forget=("doc",)), None)
    assert own_cached(engine, SECOND, taken, OTHER) <= 61
    assert len(cached(engine, FIRST)) == len(FIRST)


def test_a_running_taker_is_withheld_by_a_forget() -> None:
    """Another tenant's request that uses the span while it is forgotten publishes nothing."""
    engine = prepared()
    reader = admit(engine, SECOND, turn(OTHER), reuse=DOCS)
    assert reader.receipt.tokens.reused == 150
    ask(engine, random_tokens(40, 7), turn(SCOPE, name="t2", forget=("doc",)), None)
    prefill(reader)
    record = reader.finish()
    engine.check_integrity()
    assert record.receipt.turn == ""
    assert own_cached(engine, SECOND, record.receipt, OTHER) <= 61
