"""After any failure of the engine's own, at any time, the scheduler loop continues.

Every single call of every stage of a request is made to fail in turn: the first look into the
tree, the second lock, the third copy, the row that computes the second gap. The request still runs
to its end and says why it wasn't spliced, every slot is accounted for after each round, nothing
stays locked, and the next requests are served as if nothing had happened.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

import pytest
from census_kit import check_census
from scheduler_kit import SECRETS, Scheduler, sealed, source_of, text
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req
from sglang.srt.mem_cache.common import release_kv_cache

from leyline_engine.admit import receipts as receipts_module
from leyline_engine.admit import rules
from leyline_engine.contract import (
    CopySegment,
    Directive,
    EditPayload,
    LiteralSegment,
    Outcome,
    Reason,
    SourceRef,
    SpanLabel,
    TurnRecord,
    apply_directives,
    output_span,
    token_array,
)
from leyline_engine.records import retention
from leyline_engine.records.pending import PendingForgets
from leyline_engine.sglang import accounts as accounts_module
from leyline_engine.sglang import admission as admission_module
from leyline_engine.sglang import plugin
from leyline_engine.sglang import splicer as splicer_module
from leyline_engine.sglang import turn as turn_module
from leyline_engine.sglang.forgetting import Forgetter

pytestmark = pytest.mark.usefixtures("server_args")

CAPACITY = 900
SECRET = SECRETS + 7
_OURS = "leyline_engine."


class InjectedError(RuntimeError):
    """The injected failure."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A function that the engine calls, and where it hangs."""

    name: str
    owner: Callable[[Scheduler], Any]
    at_least: int = 1
    """Calls that the scenario makes of it."""

    def watch(self, patch: pytest.MonkeyPatch, scheduler: Scheduler, fail: int = 0) -> list[int]:
        """Count the engine's calls from here on, and let the one numbered ``fail`` raise.

        Calls by SGLang itself, which hang at the same names, and by the tests' census are neither
        counted nor broken.
        """
        owner, calls = self.owner(scheduler), [0]
        original = getattr(owner, self.name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            if _by_engine(sys._getframe(1)):
                calls[0] += 1
                if calls[0] == fail:
                    raise InjectedError
            return original(*args, **kwargs)

        patch.setattr(owner, self.name, watched)
        return calls


def _by_engine(caller: FrameType | None) -> bool:
    """True if the engine itself calls, and not the census of slots through it."""
    if caller is None or not caller.f_globals.get("__name__", "").startswith(_OURS):
        return False
    while caller is not None:
        if caller.f_globals.get("__name__") == check_census.__module__:
            return False
        caller = caller.f_back
    return True


def _cache(scheduler: Scheduler) -> Any:
    return scheduler.cache


def _pool(scheduler: Scheduler) -> Any:
    return scheduler.cache._pool


def _rules(_: Scheduler) -> Any:
    return rules.Rules


def _ledger(scheduler: Scheduler) -> Any:
    return scheduler.engine.ledger


def _publications(scheduler: Scheduler) -> Any:
    return scheduler.engine.publications


def _splicer(_: Scheduler) -> Any:
    return splicer_module.Splicer


def _forgetter(_: Scheduler) -> Any:
    return Forgetter


def _pending(_: Scheduler) -> Any:
    return PendingForgets


def _registry(scheduler: Scheduler) -> Any:
    return scheduler.engine.registry


SPLICE = {
    "check the edit": Stage("check", _rules),
    "resolve the edit": Stage("resolve_edit", lambda _: rules),
    "list the maps": Stage("maps", _rules),
    "look into the tree": Stage("find", _cache, 3),
    "read a path's slots": Stage("path_device_indices", _cache, 2),
    "lock": Stage("lock", _cache, 3),
    "plan": Stage("plan_turn", lambda _: admission_module),
    "plan the copies": Stage("plan_turn", lambda _: splicer_module),
    "derive the lineage": Stage("derive_lineage", lambda _: rules),
    "tell what is carried": Stage("carry", _rules),
    "enter into the ledger": Stage("enter", _ledger),
    "label spans": Stage("label", _ledger),
    "note a publication": Stage("note", _publications),
    "begin": Stage("begin", _splicer),
    "advance": Stage("advance", _splicer, 3),
    "take slots": Stage("take", _cache, 2),
    "copy": Stage("splice", _pool, 4),
    "graft": Stage("graft", _cache, 2),
    "make a row": Stage("__init__", lambda _: splicer_module.StageRow, 2),
    "match a row": Stage("init_next_round_input", lambda _: splicer_module.StageRow, 2),
    "finish a row": Stage("row_computed", _splicer, 2),
    "let a row go": Stage("row_released", _splicer, 2),
    "execute the plan": Stage("as_admitted", lambda _: accounts_module),
    "judge": Stage("judge", lambda _: receipts_module),
    "write the receipt": Stage("Receipt", lambda _: receipts_module),
    "send the receipt": Stage("send", lambda scheduler: scheduler.sender, 2),
    "digest the turn": Stage("token_digest", lambda _: retention),
    "retain the turn": Stage("retain", _registry),
    "settle": Stage("settle", _forgetter, 2),
}
FORGET = {
    "check the edit": Stage("check", _rules),
    "forget": Stage("forget", _forgetter),
    "list the session's turns": Stage("turns", _registry),
    "list what was published": Stage("of", _publications),
    "list lineages": Stage("under", _publications),
    "list readers": Stage("lineages_reading", _ledger),
    "see what is shared": Stage("shared", _publications),
    "cut a publication": Stage("cut", _publications),
    "look into the tree": Stage("find", _cache),
    "remove a path": Stage("unpublish", _cache, 2),
    "overwrite": Stage("overwrite", _cache, 2),
    "erase": Stage("erase", _pool, 2),
    "drop a turn": Stage("drop", _registry),
    "strike the spans": Stage("strike", _ledger),
    "open a ticket": Stage("open", _pending),
    "take tickets": Stage("take", _pending),
    "withhold readers": Stage("read_by", _ledger),
    "settle": Stage("settle", _forgetter, 2),
    "fold the keys": Stage("fold_keys", lambda _: turn_module),
}


def source_ref(req: Req, turn: str) -> SourceRef:
    return SourceRef(turn, len(source_of(req)), sealed(req))


@dataclass
class Scene:
    """A scheduler that holds what the request under test draws on."""

    scheduler: Scheduler
    prompt: array[int]
    payload: EditPayload

    def request(self) -> tuple[Req, TurnRecord | None]:
        """Run the request alone to its end."""
        return self.scheduler.serve(self.prompt, self.payload)


def splice_scene(*, overlap: bool = False) -> Scene:
    """Four copies from two sources, two gaps between them that are staged."""
    scheduler = Scheduler(CAPACITY, overlap=overlap)
    first, _ = scheduler.serve(text(120, 1), EditPayload(session="s", scope="t", turn="t1"))
    second, _ = scheduler.serve(text(100, 2), EditPayload(session="s", scope="t", turn="t2"))
    a, b = source_of(first), source_of(second)
    prompt = token_array([*a[:40], 3, *a[50:70], *a[75:110], 4, 5, *b[40:60], *b[70:90], 6, 7])
    payload = EditPayload(
        session="s",
        scope="t",
        turn="t3",
        sources=(source_ref(first, "t1"), source_ref(second, "t2")),
        directives=(Directive(40, 50, (3,)), Directive(70, 75)),
        segments=(
            CopySegment(0, 0, 40, 0),
            LiteralSegment(40, 1),
            CopySegment(0, 50, 70, 41),
            CopySegment(0, 75, 110, 61),
            LiteralSegment(96, 2),
            CopySegment(1, 40, 60, 98),
            CopySegment(1, 70, 90, 118),
            LiteralSegment(138, 2),
        ),
    )
    return Scene(scheduler, prompt, payload)


def forget_scene() -> Scene:
    """A secret that one turn reads, that a splice hides, and that is forgotten by name while
    another request of the session continues under the splice's lineage."""
    scheduler = Scheduler(CAPACITY)
    opening = text(60, 3)
    told = [*opening, *text(10, 4), SECRET, *text(9, 5), *text(40, 6)]
    spans = (SpanLabel("a", 0, 60), SpanLabel("b", 60, 80), SpanLabel("c", 80, 120))
    opened = EditPayload(session="s", scope="t", turn="t1", spans=spans)
    first, _ = scheduler.serve(told, opened)
    hides = (Directive(60, 80),)
    hidden = [*apply_directives(source_of(first), hides), 8]
    end = len(source_of(first)) - 20
    labels = (
        SpanLabel("a", 0, 60),
        SpanLabel("c", 60, 100),
        SpanLabel(output_span("t1"), 100, end),
        SpanLabel("d", end, end + 1),
    )
    cut = EditPayload(
        session="s",
        scope="t",
        turn="t2",
        sources=(source_ref(first, "t1"),),
        directives=hides,
        spans=labels,
    )
    _, record = scheduler.serve(hidden, cut)
    assert record is not None
    assert record.receipt.outcome is Outcome.SPLICED
    goes_on = EditPayload(session="s", scope="t", turn="b", lineage=record.receipt.lineage)
    scheduler.submit([*hidden, 9], goes_on, decode=12)
    scheduler.step()
    assert SECRET in scheduler.remembered(scheduler.slots_of(scheduler.running[0].req))
    forget = EditPayload(
        session="s",
        scope="t",
        turn="t3",
        lineage=record.receipt.lineage,
        spans=labels,
        forget=("b",),
    )
    return Scene(scheduler, token_array(hidden), forget)


OVERLAP = {
    "take over a gap": Stage("checkpoint_kv_cache", lambda _: splicer_module, 2),
    "copy": SPLICE["copy"],
    "graft": SPLICE["graft"],
    "make a row": SPLICE["make a row"],
    "finish a row": SPLICE["finish a row"],
    "let a row go": SPLICE["let a row go"],
}
SCENES: dict[str, tuple[Callable[[], Scene], dict[str, Stage]]] = {
    "splice": (splice_scene, SPLICE),
    "overlap": (partial(splice_scene, overlap=True), OVERLAP),
    "forget": (forget_scene, FORGET),
}
CASES = [(scene, name) for scene, (_, stages) in SCENES.items() for name in stages]


def prompted_calls(make: Callable[[], Scene], stage: Stage, patch: pytest.MonkeyPatch) -> int:
    """The number of times that the request under test calls a stage."""
    scene = make()
    with patch.context() as watching:
        calls = stage.watch(watching, scene.scheduler)
        scene.request()
    return calls[0]


def check_served(scene: Scene, req: Req) -> None:
    """The request ended by itself, and left nothing locked or waiting."""
    assert req.finished()
    assert not isinstance(req.finished_reason, FINISH_ABORT)
    assert len(req.output_ids) == 2
    assert scene.scheduler.engine.turns == {}
    scene.scheduler.serve([1, 2, 3])
    scene.scheduler.check_idle()


def check_usable(scene: Scene) -> None:
    """A clean request has exact memory, which each round of the kit checks; an edit is spliced."""
    scene.scheduler.serve(scene.prompt, decode=3)
    start = text(90, 9)
    told, _ = scene.scheduler.serve(start, EditPayload(session="n", scope="t", turn="n1"))
    cut = (Directive(40, 50),)
    payload = EditPayload(
        session="n",
        scope="t",
        turn="n2",
        sources=(source_ref(told, "n1"),),
        directives=cut,
    )
    _, record = scene.scheduler.serve([*apply_directives(source_of(told), cut), 9], payload)
    assert record is not None
    assert record.receipt.outcome is Outcome.SPLICED
    scene.scheduler.check_idle()
    scene.scheduler.flush()
    assert scene.scheduler.allocator.available_size() == CAPACITY


@pytest.mark.parametrize(("scene_name", "name"), CASES, ids=[f"{s}-{n}" for s, n in CASES])
def test_a_failing_call_costs_a_splice_at_most(
    scene_name: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is raised into the scheduler, whichever call fails, and the request is served."""
    make, stages = SCENES[scene_name]
    stage = stages[name]
    total = prompted_calls(make, stage, monkeypatch)
    assert total >= stage.at_least
    for call in range(1, total + 1):
        scene = make()
        with monkeypatch.context() as broken:
            calls = stage.watch(broken, scene.scheduler, fail=call)
            req, record = scene.request()
            assert calls[0] >= call
        check_served(scene, req)
        if record is not None:
            check_receipt(record, f"call {call} of {total}")
        if scene_name == "forget":
            left = SECRET in scene.scheduler.remembered()
            assert not left, f"call {call} of {total}: what failed to be forgotten can be found"
        check_usable(scene)


def check_receipt(record: TurnRecord, where: str) -> None:
    """The outcome has a name that fits it."""
    receipt = record.receipt
    if receipt.outcome is Outcome.SPLICED:
        assert receipt.reason is Reason.SPLICED, where
        assert receipt.tokens.spliced, where
    elif receipt.outcome is Outcome.REPREFILLED:
        assert receipt.reason in {Reason.TRANSFORM_FAILED, Reason.REPREFILLED}, where
        assert not receipt.tokens.spliced, where
    tokens = receipt.tokens
    assert tokens.prompt == tokens.prefix + tokens.spliced + tokens.prefilled, where


def test_the_scene_is_spliced() -> None:
    """Control: what the failures spoil goes well without them."""
    scene = splice_scene()
    req, record = scene.request()
    assert record is not None
    assert record.receipt.reason is Reason.SPLICED
    assert record.receipt.tokens.spliced == 95
    check_served(scene, req)
    check_usable(scene)


def test_the_secret_is_there_to_be_forgotten() -> None:
    """Control: before the forget the tree remembers the secret, and afterwards not."""
    scene = forget_scene()
    assert SECRET in scene.scheduler.remembered()
    _, record = scene.request()
    assert record is not None
    assert record.receipt.forgot is not None
    assert record.receipt.forgot.overwritten > 0
    assert SECRET not in scene.scheduler.remembered()


def test_a_row_that_was_taken_away_is_computed_anew() -> None:
    """SGLang may retract a row like any request: it isn't queued again, its turn sends another."""
    scene = splice_scene()
    scheduler = scene.scheduler
    req = scheduler.submit(scene.prompt, scene.payload, message_id="m")
    [batch] = [scheduler._admit()]
    [row] = batch
    assert isinstance(row, splicer_module.StageRow)
    scheduler._prefill_slots(batch)
    release_kv_cache(row, scheduler.cache, checkpoint=False)
    queued: list[Req] = []
    plugin._queue(lambda _, each: queued.append(each), scheduler, row)
    plugin._queue(lambda _, each: queued.append(each), scheduler, req)
    assert queued == [req]
    scheduler.drain()
    assert scheduler.sender.records["m"].receipt.reason is Reason.SPLICED
    check_served(scene, req)


def test_a_request_that_is_aborted_between_chunks_ends_once() -> None:
    """SGLang drops such a request and releases it then: its turn ends, and nothing is raised."""
    scheduler = Scheduler(CAPACITY, chunk=32)
    payload = EditPayload(session="s", scope="t", turn="t1")
    req = scheduler.submit(text(150, 11), payload, message_id="m")
    scheduler.step()
    assert scheduler.chunked is req
    scheduler.abort(req)
    assert scheduler.sender.records["m"].finished
    assert scheduler.engine.turns == {}
    assert scheduler.engine.registry.count() == 0
    scheduler.check_idle()
