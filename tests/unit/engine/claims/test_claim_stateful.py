"""Requests and claims of two tenants coming and going near the limit of a small pool."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support.examples import examples

from leyline_engine.claims.answers import UnknownClaimError
from leyline_engine.claims.events import AnyEvent, Run, from_jsonl, to_jsonl
from leyline_engine.claims.limits import ClaimRefusedError, Limits
from leyline_engine.claims.states import FINAL, State, TransitionError
from leyline_engine.contract import Claim, ClaimKind, Predicate
from leyline_lab.claims.micro import MicroRuntime, Request, Start
from leyline_lab.claims.mutants import mutants
from leyline_lab.claims.reader import read
from leyline_lab.claims.verdict import Outcome

PAGE, USABLE = 4, 24
SOURCES = st.sampled_from(["x", "y", "z"])
TENANTS = st.sampled_from(["a", "b"])
NAMES = st.sampled_from(["c1", "c2", "c3"])
RARELY = st.sampled_from([False] * 5 + [True])
LIMITS = Limits(claims=2, share=0.8, engine_share=0.9)


class ClaimMachine(RuleBasedStateMachine):
    """A MicroRuntime, watched from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[AnyEvent] = []
        self.runtime = MicroRuntime(USABLE, page_size=PAGE, limits=LIMITS, sink=self.events.append)
        self.running: dict[str, bool] = {}
        """True if their KV may be kept, by name."""
        self.lengths: dict[str, int] = {}
        self.requests = 0
        self.ticks = 0
        self.now_ms = 0
        self.revision = 0
        self.known: set[tuple[str, str]] = set()

    @initialize(lengths=st.lists(st.integers(8, 40), min_size=3, max_size=3))
    def fill(self, lengths: list[int]) -> None:
        """There is something to claim from the start."""
        for source, length in zip("xyz", lengths, strict=True):
            self.start("a", source, length, 0, no_admit=False)
            for name in list(self.running):
                self._finish(name)

    @rule(
        tenant=TENANTS,
        source=SOURCES,
        prompt=st.integers(1, 90),
        output=st.integers(0, 12),
        no_admit=RARELY,
    )
    def start(self, tenant: str, source: str, prompt: int, output: int, no_admit: bool) -> None:
        """Nothing locked goes for it; a refusal names claims; alone it never has to wait."""
        self.requests += 1
        locked = self.runtime.locked()
        before = len(self.events)
        request = Request(f"r{self.requests}", tenant, "s", source, prompt, output, no_admit)
        start, admission = self.runtime.start(request)
        assert locked == self.runtime.locked() <= set(self._resident())
        match start:
            case Start.RUNNING:
                barred = any(
                    s.claim.write_no_admit and s.claim.tenant == tenant
                    for s in self.runtime.book.live()
                )
                self.running[request.name] = not (no_admit or barred)
                self.lengths[source] = max(self.lengths.get(source, 0), prompt + output)
            case Start.REFUSED:
                assert admission.blocking
                assert set(admission.own) <= {name for _, name in admission.blocking}
                assert len(self.events) == before + 2
            case Start.BUSY:
                assert self.running and len(self.events) == before
            case Start.TOO_LARGE:
                assert -(-(prompt + output) // PAGE) + 1 > USABLE and len(self.events) == before

    def _resident(self) -> Iterator[tuple[str, int]]:
        for run in self.runtime.resident():
            yield from ((run.source, page) for page in range(run.start, run.end))

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 9))
    def finish(self, which: int) -> None:
        """In any order."""
        self._finish(list(self.running)[which % len(self.running)])

    def _finish(self, name: str) -> None:
        before = self.runtime.resident()
        self.runtime.finish(name)
        if not self.running.pop(name):
            assert self.runtime.resident() == before

    @rule(
        tenant=TENANTS,
        name=NAMES,
        source=SOURCES,
        start=st.integers(0, 24),
        length=st.integers(1, 60),
        within=st.sampled_from([True] * 7 + [False]),
        share=st.sampled_from([0.3, 1.0, 1.0]),
        kind=st.sampled_from(ClaimKind),
        priority=st.integers(0, 3),
        ttl_s=st.none() | st.integers(1, 5),
        no_admit=RARELY,
        late=RARELY,
    )
    def claim(
        self,
        *,
        tenant: str,
        name: str,
        source: str,
        start: int,
        length: int,
        within: bool,
        share: float,
        late: bool,
        no_admit: bool,
        **terms: Any,
    ) -> None:
        """New, a revision, or a copy that comes too late."""
        self.revision += 1
        end = start + length
        if within:
            start %= self.lengths[source]
            end = max(start + 1, min(end, self.lengths[source]))
        claim = Claim(
            id=name,
            tenant=tenant,
            session="s",
            predicate=Predicate(source, start, end, share),
            write_no_admit=no_admit,
            revision=max(1, self.revision - 9) if late else self.revision,
            **terms,
        )
        self.known.add((tenant, name))
        before = self.runtime.book.live()
        try:
            self.runtime.claim(claim)
        except ClaimRefusedError:
            assert self.runtime.book.live() == before

    @precondition(lambda self: self.revision % 3)
    @rule(tenant=TENANTS, name=NAMES)
    def release(self, tenant: str, name: str) -> None:
        """Also of claims that never were, or have ended."""
        if (tenant, name) in self.known:
            self.runtime.release(tenant, name)
            assert self.runtime.book.status(tenant, name).state in FINAL
        else:
            with pytest.raises(UnknownClaimError):
                self.runtime.release(tenant, name)

    @rule(tenant=TENANTS, name=NAMES)
    def demote(self, tenant: str, name: str) -> None:
        """Works on what is locked and on nothing else."""
        live = {(s.claim.tenant, s.claim.id): s for s in self.runtime.book.live()}
        status = live.get((tenant, name))
        if status and status.claim.hard and status.state is State.MATERIALIZED:
            self.runtime.demote(tenant, name)
            assert self.runtime.book.status(tenant, name).state is State.DEMOTED
        else:
            with pytest.raises((UnknownClaimError, TransitionError)):
                self.runtime.demote(tenant, name)

    @rule(seconds=st.integers(0, 3))
    def tick(self, seconds: int) -> None:
        """No live claim is past its deadline afterwards."""
        self.ticks += 1
        self.now_ms += 1000 * seconds
        self.runtime.tick(self.ticks, self.now_ms)
        for status in self.runtime.book.live():
            assert status.remaining_ms is None or status.remaining_ms > 0

    @rule(source=SOURCES, start=st.integers(0, 10), pages=st.integers(1, 3))
    def lose(self, source: str, start: int, pages: int) -> None:
        """A fault takes pages, whoever locked them."""
        self.runtime.lose(Run(source, start, start + pages), "fault")

    @invariant()
    def every_block_has_one_owner(self) -> None:
        """None is lost, none is lent twice."""
        assert self.runtime.blocks() == list(range(USABLE))

    @invariant()
    def what_is_promised_is_there(self) -> None:
        """Live claims hold at least what they require; the cache locks what the book says."""
        assert len(self.runtime.locked()) == self.runtime.book.protected_pages
        for status in self.runtime.book.live():
            if status.state is not State.ACCEPTED:
                assert status.resident_tokens >= status.required_tokens

    @invariant()
    def events_alone_tell_the_same(self) -> None:
        """The reader comes to the same pool, locks and states, and sees nothing go in silence."""
        verdict = read(self.events)
        assert verdict.void == "" and verdict.balance is not None
        balance = verdict.balance
        assert balance.free == self.runtime.free
        assert sum(balance.resident.values()) == sum(r.pages for r in self.runtime.resident())
        assert balance.locked == len(self.runtime.locked())
        assert set(balance.running) == self.running.keys()
        assert balance.unfinished == () and balance.now_ms == self.now_ms
        for tenant, name in self.known:
            state = self.runtime.book.status(tenant, name).state
            assert balance.claims.get(f"{tenant}/{name}", State.REJECTED) == state
        assert sum(balance.resident.values()) + balance.free <= USABLE

    def teardown(self) -> None:
        """Everything ends, and every life of every claim has exactly one end."""
        for name in list(self.running):
            self._finish(name)
        for status in self.runtime.book.live():
            self.runtime.release(status.claim.tenant, status.claim.id)
        assert self.runtime.locked() == frozenset() and self.runtime.book.protected_pages == 0
        for tenant, name in self.known:
            assert self.runtime.book.status(tenant, name).state in FINAL
        verdict = read(from_jsonl(to_jsonl(self.events)))
        assert verdict == read(self.events)
        ends = {
            Outcome.MATERIALIZATION_FAILURE,
            Outcome.SOFT_EVICTION,
            Outcome.EXPIRY,
            Outcome.RELEASE,
            Outcome.HARM,
            Outcome.REVISION,  # of the terms before
        }
        for key in {f"{tenant}/{name}" for tenant, name in self.known}:
            said = [f.outcome for f in verdict.findings if f.subject == key]
            assert said.count(Outcome.ACCEPTANCE) == sum(outcome in ends for outcome in said)


def test_the_book_keeps_its_promises_whatever_comes() -> None:
    """Conservation, protection, one end per claim, and a trace that shows it all."""
    run_state_machine_as_test(
        ClaimMachine,
        settings=settings(max_examples=examples(200), stateful_step_count=50, deadline=None),
    )


class SpoiltTraces(ClaimMachine):
    """The same, ending with a look at what a spoilt trace of it reads like."""

    def teardown(self) -> None:
        """No event dropped and no dependent two swapped go unnoticed."""
        verdict = read(self.events)
        for mutant in mutants(self.events):
            assert read(mutant.events) != verdict, mutant.name
        super().teardown()


def test_no_spoilt_trace_of_any_history_reads_like_the_whole() -> None:
    """The rules of the litmus cases hold for whatever claims and requests do."""
    run_state_machine_as_test(
        SpoiltTraces,
        settings=settings(max_examples=examples(25), stateful_step_count=25, deadline=None),
    )


@pytest.mark.nightly
def test_no_spoilt_trace_of_longer_histories_reads_like_the_whole() -> None:
    """The same over many and longer histories."""
    run_state_machine_as_test(
        SpoiltTraces, settings=settings(max_examples=200, stateful_step_count=50, deadline=None)
    )


@pytest.mark.nightly
def test_the_book_keeps_its_promises_for_longer() -> None:
    """The same over many and longer histories."""
    run_state_machine_as_test(
        ClaimMachine, settings=settings(max_examples=1000, stateful_step_count=80, deadline=None)
    )
