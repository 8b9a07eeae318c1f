"""The margin gate in SGLang's queue: what a turn that isn't trusted leaves, and what it costs."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduler_kit import Scheduler, sealed, source_of, text

from leyline_engine.contract import (
    Directive,
    EditPayload,
    Outcome,
    Receipt,
    ReuseCounts,
    ReuseMode,
    ReusePayload,
    SourceRef,
    apply_directives,
)
from leyline_engine.sglang.margin_gate import Marks

pytestmark = pytest.mark.usefixtures("server_args")

ASKED = ReusePayload(mode=ReuseMode.LIVE, margin=2.0)
DOC = text(150, 9)
NEWS = text(120, 8)
FIRST = [*text(70, 1), 1, *DOC, 2, *NEWS, 5, *text(20, 2)]
SECOND = [*text(60, 3), 3, *DOC, 4, *text(30, 4)]
HEAD = 61
"""Leading tokens of :data:`SECOND` that nobody else has."""


def turn(session: str, name: str = "t1", scope: str = "t", **fields: Any) -> EditPayload:
    """The payload of a turn that edits nothing."""
    return EditPayload(session=session, scope=scope, turn=name, **fields)


def ask(
    scheduler: Scheduler,
    prompt: list[int],
    payload: EditPayload,
    *,
    margin: float = 5.0,
    reuse: ReusePayload | None = ASKED,
) -> Receipt:
    """The receipt of one request, served alone, whose first token has this margin."""
    scheduler.margin = margin
    _, record = scheduler.serve(prompt, payload, reuse=reuse)
    assert record is not None
    counts = record.receipt.tokens
    assert counts.prefix + counts.spliced + counts.reused + counts.prefilled == len(prompt)
    scheduler.check_idle()
    return record.receipt


def prepared(**options: Any) -> Scheduler:
    """A scheduler in which session ``a`` has the documents."""
    scheduler = Scheduler(**options)
    ask(scheduler, FIRST, turn("a"))
    return scheduler


@pytest.mark.parametrize("core", ["rust", "python"])
@pytest.mark.parametrize("chunk", [None, 20])
def test_the_next_turn_computes_what_was_not_trusted(core: str, chunk: int | None) -> None:
    """It continues its exact beginning alone, copies nothing, and the turn after it reuses."""
    scheduler = prepared(core=core, chunk=chunk)
    doubted = ask(scheduler, SECOND, turn("b"), margin=0.5)
    assert doubted.reuse == ReuseCounts(
        mode=ReuseMode.LIVE, tenant=150, margin=0.5, extents=((61, 211),)
    )
    grown = [*SECOND, 7, *NEWS, 8]
    gated = ask(scheduler, grown, turn("b", "t2", lineage=doubted.lineage))
    assert gated.reuse == ReuseCounts(mode=ReuseMode.LIVE, gated=True)
    assert (gated.tokens.prefix, gated.tokens.reused, gated.lineage) == (HEAD, 0, ())
    more = [*grown, 9, *FIRST[71:], 6]
    after = ask(scheduler, more, turn("b", "t3", lineage=gated.lineage))
    assert after.reuse is not None
    assert (after.reuse.gated, after.reuse.margin) == (False, 5.0)
    assert after.tokens.prefix == len(grown)
    assert after.tokens.reused >= 250


def test_a_trusted_turn_is_continued() -> None:
    """A margin at the threshold is enough; the receipt has it, and the KV stays."""
    scheduler = prepared()
    first = ask(scheduler, SECOND, turn("b"), margin=2.0)
    assert first.reuse == ReuseCounts(
        mode=ReuseMode.LIVE, tenant=150, margin=2.0, extents=((61, 211),)
    )
    grown = [*SECOND, 7, *NEWS, 8]
    receipt = ask(scheduler, grown, turn("b", "t2", lineage=first.lineage))
    assert receipt.reuse == ReuseCounts(
        mode=ReuseMode.LIVE, tenant=120, margin=5.0, extents=((243, 363),)
    )
    assert receipt.tokens.prefix == len(SECOND)


def test_nothing_is_judged_without_a_gate_or_without_copies() -> None:
    """A threshold of 0, a prompt of which nothing is found, and mode observe have no margin."""
    scheduler = prepared()
    live, observe = ReusePayload(mode=ReuseMode.LIVE), ReuseMode.OBSERVE
    plain = ask(scheduler, SECOND, turn("b"), margin=0.0, reuse=live)
    assert plain.reuse == ReuseCounts(mode=ReuseMode.LIVE, tenant=150, extents=((61, 211),))
    new = ask(scheduler, text(80, 33), turn("c"), margin=0.0)
    assert new.reuse == ReuseCounts(mode=ReuseMode.LIVE)
    asked = msgspec.structs.replace(ASKED, mode=observe)
    seen = ask(scheduler, [*text(50, 34), *DOC, 6], turn("d"), margin=0.0, reuse=asked)
    assert seen.reuse == ReuseCounts(mode=observe, tenant=150)
    assert len(scheduler.engine.margins.marks) == 0


def test_other_sessions_are_unaffected() -> None:
    """They reuse what the first session has, and nothing of the turn that isn't trusted."""
    scheduler = prepared()
    words = text(100, 12)
    doubted = [*SECOND, *words, 11]
    ask(scheduler, doubted, turn("b"), margin=0.5)
    receipt = ask(scheduler, [*text(50, 6), *DOC, 4], turn("c"))
    assert receipt.reuse == ReuseCounts(
        mode=ReuseMode.LIVE, tenant=150, margin=5.0, extents=((50, 200),)
    )
    spread = ask(scheduler, [*text(50, 13), *words, 4], turn("d"))
    assert spread.tokens.reused == 0, "it has read what isn't trusted"
    other = ask(scheduler, [*text(50, 14), *DOC, 4], turn("b", scope="else"))
    assert other.reuse == ReuseCounts(mode=ReuseMode.LIVE)


def test_no_row_that_read_what_was_reused_stays() -> None:
    """Its slots are free, and overwritten."""
    scheduler = prepared()
    exact = scheduler.cache.all_values_flatten().numel()
    ask(scheduler, SECOND, turn("b"), margin=0.5)
    assert scheduler.cache.all_values_flatten().numel() == exact + HEAD
    free = scheduler.allocator.get_all_free_pages().long()
    left = scheduler.pool.kv_buffer[0][free, 0]
    assert not left.any()


def test_a_turn_that_asks_for_no_reuse_uses_the_mark_up() -> None:
    """It is computed as it is; the one after it reuses."""
    scheduler = prepared()
    doubted = ask(scheduler, SECOND, turn("b"), margin=0.5)
    plain = ask(scheduler, [*SECOND, 7], turn("b", "t2", lineage=doubted.lineage), reuse=None)
    assert (plain.reuse, plain.tokens.prefix) == (None, HEAD)
    after = ask(scheduler, [*SECOND, 7, *NEWS, 8], turn("b", "t3"))
    assert after.reuse == ReuseCounts(
        mode=ReuseMode.LIVE, tenant=120, margin=5.0, extents=((243, 363),)
    )


def test_an_edit_keeps_what_came_before_the_reuse() -> None:
    """Of an edit's copies and reuse in one turn, the part in front of the reuse stays cached."""
    scheduler = prepared()
    told, _ = scheduler.serve(text(200, 5), turn("b"))
    cut = Directive(50, 60, (3,))
    sources = (SourceRef("t1", len(source_of(told)), sealed(told)),)
    prompt = [*apply_directives(source_of(told), [cut]), 9, *DOC, 5, 6]
    payload = turn("b", "t2", sources=sources, directives=(cut,))
    doubted = ask(scheduler, prompt, payload, margin=0.5)
    assert (doubted.outcome, doubted.tokens.spliced, doubted.tokens.reused) == (
        Outcome.SPLICED,
        141,
        150,
    )
    gated = ask(scheduler, [*prompt, 7], turn("b", "t3", lineage=doubted.lineage))
    assert gated.reuse == ReuseCounts(mode=ReuseMode.LIVE, gated=True)
    assert gated.tokens.prefix == prompt.index(9, 190) + 1
    assert [run.start for run in gated.lineage] == [51]


def test_a_turn_is_judged_before_it_can_end() -> None:
    """The margin of a request whose first token is its last is in its receipt, and counts."""
    scheduler = prepared()
    scheduler.margin = 0.5
    _, record = scheduler.serve(SECOND, turn("b"), decode=1, reuse=ASKED)
    assert record is not None
    assert record.receipt.reuse == ReuseCounts(
        mode=ReuseMode.LIVE, tenant=150, margin=0.5, extents=((61, 211),)
    )
    scheduler.check_idle()
    gated = ask(scheduler, [*SECOND, 7], turn("b", "t2", lineage=record.receipt.lineage))
    assert gated.reuse == ReuseCounts(mode=ReuseMode.LIVE, gated=True)


def test_a_retracted_turn_is_judged_once() -> None:
    """Memory that runs out in its answer doesn't bring back what isn't trusted."""
    scheduler = prepared()
    scheduler.margin = 0.5
    req = scheduler.submit(SECOND, turn("b"), decode=6, message_id="m", reuse=ASKED)
    while not scheduler.running:
        scheduler.step()
    scheduler.margin = 5.0
    scheduler.retract(scheduler.running[0])
    scheduler.drain()
    assert req.finished()
    scheduler.check_idle()
    receipt = scheduler.sender.records["m"].receipt
    assert receipt.reuse == ReuseCounts(
        mode=ReuseMode.LIVE, tenant=150, margin=0.5, extents=((61, 211),)
    )
    gated = ask(scheduler, [*SECOND, 7], turn("b", "t2", lineage=receipt.lineage))
    assert gated.tokens.prefix == HEAD


def test_a_forget_is_complete_beside_the_gate() -> None:
    """A forget of the first session reaches a turn that runs and isn't trusted, too."""
    scheduler = prepared()
    scheduler.margin = 0.5
    scheduler.submit(SECOND, turn("b"), decode=6, message_id="m", reuse=ASKED)
    while not scheduler.running:
        scheduler.step()
    forget = scheduler.submit(text(40, 7), turn("a", "t2", forget=("any",)), message_id="f")
    scheduler.drain()
    assert forget.finished()
    scheduler.check_idle()
    assert scheduler.sender.records["m"].receipt.turn == ""
    counts = scheduler.sender.forgotten.get("f") or scheduler.sender.records["f"].receipt.forgot
    assert counts is not None
    assert counts.pending == 0


@pytest.mark.parametrize("failure", ["an unreadable margin", "another rank"])
def test_ranks_decide_alike(failure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that can't read a margin still votes, and one that distrusts decides for all."""
    scheduler = prepared()
    votes: list[bool] = []
    gate: Any = scheduler.engine.margins

    def agree(trusted: bool) -> bool:
        votes.append(trusted)
        return trusted and failure != "another rank"

    monkeypatch.setattr(gate, "_agree", agree)
    if failure == "an unreadable margin":
        broken: Any = lambda *_: (_ for _ in ()).throw(RuntimeError("injected"))  # noqa: E731
        monkeypatch.setattr("leyline_engine.sglang.margin_gate.top_margins", broken)
    ask(scheduler, SECOND, turn("b"), margin=5.0)
    assert votes == [True]
    assert (("t", "b") in gate.marks) == (failure == "another rank")


def test_a_flush_takes_marks_along() -> None:
    """Nothing that isn't trusted is left after it."""
    scheduler = prepared()
    ask(scheduler, SECOND, turn("b"), margin=0.5)
    assert ("t", "b") in scheduler.engine.margins.marks
    scheduler.flush()
    assert len(scheduler.engine.margins.marks) == 0


@given(st.lists(st.tuples(st.sampled_from("xyz"), st.sampled_from("abcdefgh"), st.booleans())))
def test_marks_are_bounded_and_fair(steps: list[tuple[str, str, bool]]) -> None:
    """Above the limit a tenant with the most marks loses its oldest, and nobody else any."""
    marks, limit = Marks(4), 4
    model: dict[str, list[str]] = {}
    for scope, name, adds in steps:
        own = model.setdefault(scope, [])
        if name in own:
            own.remove(name)
        if adds:
            own.append(name)
            marks.add((scope, name))
        else:
            marks.discard((scope, name))
        if sum(map(len, model.values())) > limit:
            sizes = {each: len(names) for each, names in model.items()}
            lost = [
                each
                for each, names in model.items()
                if any((each, other) not in marks for other in names)
            ]
            assert len(lost) == 1
            assert sizes[lost[0]] == max(sizes.values())
            model[lost[0]].pop(0)
        for each in "xyz":
            for other in "abcdefgh":
                assert ((each, other) in marks) == (other in model.get(each, []))
        assert len(marks) == sum(map(len, model.values())) <= limit
