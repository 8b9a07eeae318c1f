"""Long work in steps of the scheduler: what is put off, and what must never be."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from claim_scheduler import ClaimScheduler
from scheduler_kit import SECRETS, Scheduler, sealed, source_of, text

from leyline_engine.contract import (
    ClaimKind,
    ClaimState,
    Directive,
    EditPayload,
    ForgetCounts,
    Outcome,
    SourceRef,
    SpanLabel,
    apply_directives,
    token_array,
)
from leyline_engine.records.publications import Space
from leyline_engine.settings import copy_limits
from leyline_engine.sglang import forgetting
from leyline_engine.sglang.engine import Chores

pytestmark = pytest.mark.usefixtures("server_args")

SECRET = SECRETS + 7
HEAD = text(40, 1)
BRANCHES, TAIL = 8, 32


def telling(turn: str, length: int, **fields: object) -> EditPayload:
    """The payload of a prompt whose part after the head is labelled ``secret``."""
    spans = (SpanLabel("head", 0, len(HEAD)), SpanLabel("secret", len(HEAD), length))
    return EditPayload(session="s", scope="t", turn=turn, spans=spans, **fields)


def branches() -> list[list[int]]:
    """Prompts that part after the secret."""
    return [[*HEAD, SECRET, *text(30, 2), *text(TAIL, 10 + number)] for number in range(BRANCHES)]


def holding(scheduler: Scheduler) -> int:
    """The number of slots, free ones included, whose contents have read the secret."""
    rows = scheduler.read(torch.arange(scheduler.page, scheduler.capacity + scheduler.page))
    return sum(SECRET in scheduler.has_read[nonce] for _, _, nonce in rows)


@pytest.mark.parametrize("page", [1, 16])
def test_a_long_forget_is_unmatchable_at_once_and_overwritten_in_steps(
    monkeypatch: pytest.MonkeyPatch, page: int
) -> None:
    """Most branches wait to be removed, but nobody finds one; the receipt closes at the end."""
    monkeypatch.setattr(forgetting, "_AT_ONCE", 1)
    scheduler = Scheduler(page=page)
    prompts = branches()
    for number, prompt in enumerate(prompts):
        scheduler.serve(prompt, telling(f"t{number}", len(prompt)))
    # A branch that still runs holds its path.
    running = scheduler.submit([*prompts[0], 3], telling("r", len(prompts[0]) + 1), decode=30)
    scheduler.step()
    assert not running.finished()
    redacted = [*HEAD, *text(20, 3)]
    spans = (SpanLabel("head", 0, len(HEAD)), SpanLabel("rest", len(HEAD), len(redacted)))
    forget = EditPayload(session="s", scope="t", turn="f", spans=spans, forget=("secret",))
    scheduler.submit(redacted, forget, message_id="forget", decode=20)
    scheduler.step()
    assert len(scheduler.cache.condemned) > 3, "control: nothing waits"
    for prompt in prompts:
        found = scheduler.cache.find(token_array(prompt), Space()).device_prefix_len
        assert found <= len(HEAD)
    assert "forget" not in scheduler.sender.records, "control: it was admitted in the same step"
    left = [holding(scheduler)]
    scheduler.step()
    left.append(holding(scheduler))
    first = scheduler.sender.records["forget"].receipt.forgot
    assert first is not None and first.pending > 0
    for _ in range(8):
        scheduler.step()
        left.append(holding(scheduler))
    assert not running.finished()
    assert left[0] - left[-1] > (BRANCHES - 3) * TAIL, "control: nothing was removed in steps"
    assert all(before - after <= 3 * TAIL for before, after in pairwise(left))
    scheduler.drain()
    assert holding(scheduler) == 0
    counts = scheduler.sender.forgotten["forget"]
    assert counts.pending == 0
    assert counts.overwritten == scheduler.seen.overwritten >= BRANCHES * 16
    scheduler.check_idle()


def test_a_receipt_counts_what_was_removed_while_its_turn_waited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If all is overwritten before a turn that forgot is admitted, its receipt is closed."""
    monkeypatch.setattr(forgetting, "_AT_ONCE", 1)
    scheduler = Scheduler()
    for number, prompt in enumerate(branches()[:3]):
        scheduler.serve(prompt, telling(f"t{number}", len(prompt)))
    held = holding(scheduler)
    forget = EditPayload(session="s", scope="t", turn="f", forget=("secret",))
    scheduler.submit([*HEAD, 1], forget, message_id="forget", decode=1)
    scheduler.step()
    assert scheduler.cache.condemned, "control: nothing waits"
    assert "forget" not in scheduler.sender.records
    while scheduler.engine.chores.step():
        continue
    assert not scheduler.cache.condemned, "control: something still waits"
    scheduler.drain()
    counts = scheduler.sender.records["forget"].receipt.forgot
    assert counts == ForgetCounts(overwritten=held)


def test_claims_on_what_waits_to_be_removed_end_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can match it any more, so nobody is left to believe in it until it is overwritten."""
    monkeypatch.setattr(forgetting, "_AT_ONCE", 1)
    scheduler = ClaimScheduler(2000)
    for number, prompt in enumerate(branches()):
        scheduler.serve(prompt, telling(f"t{number}", len(prompt)))
        terms = {"id": f"c{number}", "tenant": "t", "source": f"t{number}", "kind": ClaimKind.SOFT}
        scheduler.claim("s", len(prompt), start=len(prompt) - TAIL, **terms)
    forget = EditPayload(session="s", scope="t", turn="f", forget=("secret",))
    scheduler.submit([*HEAD, 1], forget, decode=1)
    scheduler.step()
    assert len(scheduler.cache.condemned) > 3, "control: nothing waits"
    for number in range(BRANCHES):
        assert scheduler.status(f"c{number}", "t").state is ClaimState.HARMED
    scheduler.drain()


def test_a_flush_leaves_nothing_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flush first overwrites all that a forget put off, and its receipt closes."""
    monkeypatch.setattr(forgetting, "_AT_ONCE", 1)
    scheduler = Scheduler()
    for number, prompt in enumerate(branches()):
        scheduler.serve(prompt, telling(f"t{number}", len(prompt)))
    forget = EditPayload(session="s", scope="t", turn="f", forget=("secret",))
    scheduler.submit([*HEAD, 1], forget, message_id="forget", decode=1)
    while scheduler.waiting or scheduler.running:
        scheduler.step()
    assert scheduler.cache.condemned, "control: nothing waits"
    scheduler.flush()
    assert holding(scheduler) == 0
    assert scheduler.sender.forgotten["forget"].pending == 0


def test_each_worker_gets_its_share_of_every_step() -> None:
    """One with much to do holds up neither the step nor the others, and a failure stops nobody."""

    class Worker:
        def __init__(self, portions: int, *, fails: bool = False) -> None:
            self.left, self.fails = portions, fails

        def work(self) -> bool:
            if self.fails:
                raise ValueError("broken")
            self.left -= self.left > 0
            return self.left > 0

    busy, broken, idle = Worker(100), Worker(9, fails=True), Worker(3)
    chores = Chores((busy, broken, idle))
    assert chores.step()
    assert (100 - busy.left, idle.left) == (2, 1)
    while chores.step():
        continue
    assert busy.left == idle.left == 0


def test_short_runs_between_gaps_save_a_forward() -> None:
    """The receipt counts stages, and a price above a run's length joins the gaps around it."""
    stages = {}
    for price in (0, 20, 40):
        scheduler = Scheduler(stage_cost=price)
        told, _ = scheduler.serve(text(160, 1), EditPayload(session="s", scope="t", turn="t1"))
        cuts = [Directive(at, at + 5, (3, 4)) for at in (50, 70, 110)]  # runs of 15, 35 and 46
        payload = EditPayload(
            session="s",
            scope="t",
            turn="t2",
            sources=(SourceRef("t1", len(source_of(told)), sealed(told)),),
            directives=tuple(cuts),
        )
        prompt = [*apply_directives(source_of(told), cuts), 9, 8]
        before = scheduler.forwards
        _, record = scheduler.serve(prompt, payload)
        assert record is not None
        receipt = record.receipt
        assert receipt.outcome is Outcome.SPLICED
        stages[price] = (receipt.stages, receipt.tokens.spliced)
        assert scheduler.forwards - before == receipt.stages + 2
        scheduler.check_idle()
    assert stages == {0: (3, 15 + 35 + 46), 20: (2, 35 + 46), 40: (1, 46)}


@pytest.mark.parametrize("overlap", [False, True])
def test_a_turn_waits_for_no_result_of_its_gap(overlap: bool) -> None:
    """The next step of a turn shares the forward after its gap's, with the gap of a turn that came
    later; also with overlap, where a forward's result comes a forward late."""
    scheduler = Scheduler(overlap=overlap)
    cut = Directive(50, 55, (3, 4))
    edited = []
    for seed, name in enumerate(("a", "b")):
        told, _ = scheduler.serve(text(160, seed), EditPayload(session=name, scope="t", turn="t1"))
        source = SourceRef("t1", len(source_of(told)), sealed(told))
        payload = EditPayload(
            session=name, scope="t", turn="t2", sources=(source,), directives=(cut,)
        )
        edited.append(([*apply_directives(source_of(told), (cut,)), 9, 8], payload))
    before = scheduler.forwards
    scheduler.submit(*edited[0], message_id="first")
    scheduler.step()  # the first one's gap
    scheduler.submit(*edited[1], message_id="second")
    while not {"first", "second"} <= scheduler.sender.records.keys():
        scheduler.step()
    spent = scheduler.forwards - before
    scheduler.drain()
    for name in ("first", "second"):
        receipt = scheduler.sender.records[name].receipt
        assert (receipt.outcome, receipt.stages) == (Outcome.SPLICED, 1)
    assert spent == 3
    scheduler.check_idle()


def test_limits_of_copies_are_read_from_the_environment() -> None:
    """A value that is no number of tokens stops the engine instead of being guessed."""
    assert copy_limits({}) == (32, 64)
    names = ("LEYLINE_MIN_COPY_TOKENS", "LEYLINE_STAGE_COST_TOKENS")
    assert copy_limits(dict(zip(names, ("1", "200"), strict=True))) == (1, 200)
    for name in names:
        with pytest.raises(ValueError, match=name):
            copy_limits({name: "-1"})
