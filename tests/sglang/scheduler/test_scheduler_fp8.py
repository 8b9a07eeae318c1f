"""FP8 in SGLang's queue: a row whose as-computed key gave way is prefilled, and never turned.

The scheduler checks after each step that every key of a running request is its as-computed one,
turned once.
"""

from __future__ import annotations

from random import Random

import pytest
from pool_kit import FP8
from scheduler_kit import Scheduler, sealed, source_of, text
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from leyline_engine.contract import (
    Directive,
    EditPayload,
    Outcome,
    Reason,
    Receipt,
    SourceRef,
    apply_directives,
)
from leyline_engine.rows.pool import SplicePool

pytestmark = pytest.mark.usefixtures("server_args")

SINK = 32


class Session:
    """The turns of one session, each an edit of the one before."""

    def __init__(self, scheduler: Scheduler, name: str, tokens: int = 150, seed: int = 1) -> None:
        self.scheduler, self.name, self.turns = scheduler, name, 0
        self.last, record = scheduler.serve(text(tokens, seed), self._payload())
        assert record is not None
        self.receipt: Receipt = record.receipt

    def _payload(self, *cuts: Directive) -> EditPayload:
        self.turns += 1
        turn = f"t{self.turns}"
        if not cuts:
            return EditPayload(session=self.name, scope="t", turn=turn)
        told = source_of(self.last)
        return EditPayload(
            session=self.name,
            scope="t",
            turn=turn,
            sources=(SourceRef(f"t{self.turns - 1}", len(told), sealed(self.last)),),
            directives=cuts,
            lineage=tuple(run for run in self.receipt.lineage if run.start < cuts[0].start),
        )

    def submit(self, *cuts: Directive) -> Req:
        """Queue the last turn, edited, and a tail."""
        payload = self._payload(*cuts)
        prompt = [*apply_directives(source_of(self.last), list(cuts)), 9, 8]
        return self.scheduler.submit(prompt, payload, message_id=f"{self.name}.{self.turns}")

    def take(self, req: Req) -> Receipt:
        """Take over a turn that has run."""
        self.last = req
        self.receipt = self.scheduler.sender.records[f"{self.name}.{self.turns}"].receipt
        return self.receipt

    def edit(self, *cuts: Directive) -> Receipt:
        """Run an edit, alone."""
        req = self.submit(*cuts)
        self.scheduler.drain()
        return self.take(req)


def test_chained_edits_are_spliced_as_long_as_the_ring_holds_their_keys() -> None:
    """Forty edits, each of what the one before left, copy all that an edit can copy."""
    scheduler = Scheduler(dtype=FP8)
    session = Session(scheduler, "s")
    rng = Random(5)
    for _ in range(40):
        at = rng.randrange(SINK + 1, 40)
        length = len(source_of(session.last))
        receipt = session.edit(Directive(at, at + rng.randrange(5), (rng.randrange(400),)))
        assert receipt.outcome is Outcome.SPLICED
        assert receipt.tokens.prefilled < 12
        assert receipt.tokens.spliced > length - 60
    scheduler.check_idle()


def test_what_gave_way_is_prefilled_and_the_rest_spliced() -> None:
    """A ring of 40 keys: of 110 rows that were turned, 40 are turned again, and all after the
    next prefill."""
    scheduler = Scheduler(dtype=FP8, origins=40)
    session = Session(scheduler, "s")
    cut = Directive(SINK + 2, SINK + 5)
    first = session.edit(cut)
    assert first.tokens.spliced > 110
    second = session.edit(cut)
    # Three of the 40 are cut; the last turn's own tokens are as computed.
    assert (second.outcome, second.tokens.spliced) == (Outcome.SPLICED, 37 + 4)
    assert second.tokens.prefilled == second.tokens.prompt - second.tokens.prefix - 41
    third = session.edit(cut)
    assert third.tokens.spliced > 100
    scheduler.check_idle()


def test_without_the_answer_of_the_pool_keys_are_rounded_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Control: where every row may be turned, the scheduler's check finds the first such key."""
    monkeypatch.setattr(SplicePool, "turnable", lambda *_: None)
    session = Session(Scheduler(dtype=FP8, origins=40), "s")
    cut = Directive(SINK + 2, SINK + 5)
    session.edit(cut)
    with pytest.raises(AssertionError, match="a key stands where it doesn't belong"):
        session.edit(cut)


def test_a_turn_of_which_nothing_may_be_turned_says_so() -> None:
    """The request runs as an ordinary prefill, and its receipt names the source as evicted."""
    scheduler = Scheduler(dtype=FP8, origins=1, min_copy=8)
    session = Session(scheduler, "s")
    cut = Directive(SINK + 2, SINK + 5)
    session.edit(cut)
    Session(scheduler, "other", seed=2).edit(cut)  # takes the one entry
    receipt = session.edit(cut)
    assert (receipt.outcome, receipt.reason) == (Outcome.REPREFILLED, Reason.SOURCE_EVICTED)
    assert receipt.tokens.spliced == 0
    assert receipt.tokens.prefilled == receipt.tokens.prompt - cut.start
    scheduler.check_idle()


def test_rows_that_stay_where_they_are_are_copied_all_the_same() -> None:
    """A replacement of the same length moves nothing, so no as-computed key is needed."""
    scheduler = Scheduler(dtype=FP8, origins=1)
    session = Session(scheduler, "s")
    session.edit(Directive(SINK + 2, SINK + 5))
    receipt = session.edit(Directive(SINK + 2, SINK + 5, (401, 402, 403)))
    assert receipt.outcome is Outcome.SPLICED
    assert receipt.tokens.spliced > 100
    assert receipt.tokens.prefilled < 8
    scheduler.check_idle()


def test_keys_that_give_way_in_the_middle_of_a_splice_are_prefilled() -> None:
    """While a turn waits for its gap, another one's splice takes the ring: the turn is planned
    again."""
    scheduler = Scheduler(dtype=FP8, origins=120)
    session, other = Session(scheduler, "s"), Session(scheduler, "other", seed=2)
    session.edit(Directive(SINK + 2, SINK + 5))
    cuts = (Directive(SINK + 2, SINK + 4), Directive(70, 72, (5, 6, 7, 8, 9)))
    one, two = session.submit(*cuts), other.submit(Directive(SINK + 2, SINK + 3))
    scheduler.drain()
    theirs = other.take(two)
    assert theirs.tokens.spliced > 100
    receipt = session.take(one)
    assert receipt.outcome is Outcome.SPLICED
    assert 0 < receipt.tokens.spliced < 20  # what the turn before computed
    assert receipt.tokens.prefilled > 100
    scheduler.check_idle()


@pytest.mark.parametrize("flushed", [True, False])
def test_slots_that_were_spliced_to_are_as_good_as_new(flushed: bool) -> None:
    """After a flush or an eviction, other prompts in the same slots are spliced whole."""
    scheduler = Scheduler(400, dtype=FP8, origins=20)
    session = Session(scheduler, "s")
    for _ in range(3):
        session.edit(Directive(SINK + 2, SINK + 5))
    if flushed:
        scheduler.flush()
    else:
        scheduler.cache.evict(EvictParams(num_tokens=400))
    for seed in (2, 3):
        fresh = Session(scheduler, f"fresh{seed}", tokens=180, seed=seed)
        receipt = fresh.edit(Directive(SINK + 2, SINK + 5))
        assert receipt.tokens.spliced > 140
        assert receipt.tokens.prefilled < 8
    scheduler.check_idle()


def test_pages_of_sixteen_prefill_what_gave_way_in_whole_pages() -> None:
    """Copies between rows that gave way end at the edges of pages."""
    scheduler = Scheduler(dtype=FP8, origins=60, page=16)
    session = Session(scheduler, "s")
    cut = Directive(SINK + 2, SINK + 5)
    session.edit(cut)
    receipt = session.edit(cut)
    assert receipt.outcome is Outcome.SPLICED
    assert receipt.tokens.spliced % 16 == 0
    assert 0 < receipt.tokens.spliced <= 60
    scheduler.check_idle()


@pytest.mark.parametrize("seed", range(3))
def test_no_history_of_a_scheduler_turns_a_key_twice(seed: int) -> None:
    """Sessions that branch, edit and evict one another in a small pool with a small ring."""
    rng = Random(seed)
    scheduler = Scheduler(700, dtype=FP8, origins=rng.choice([30, 90]), chunk=64)
    sessions = [Session(scheduler, f"s{i}", tokens=120, seed=i) for i in range(4)]
    spliced = 0
    for _ in range(25):
        chosen = rng.sample(sessions, 2)
        cuts = []
        for session in chosen:
            length = len(source_of(session.last))
            start = rng.randrange(SINK, max(SINK + 1, length - 40))
            new = tuple(text(rng.randrange(6), rng.randrange(99)))
            cuts.append(Directive(start, start + rng.randrange(1, 6), new))
        reqs = [session.submit(cut) for session, cut in zip(chosen, cuts, strict=True)]
        scheduler.drain()
        for session, req in zip(chosen, reqs, strict=True):
            spliced += session.take(req).tokens.spliced
    assert spliced > 500
    scheduler.check_idle()
