"""Interleaved sequences in a small pool, at random: accounting holds, clean answers are exact."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.examples import examples
from support.pool_levels import check_levels
from support.replay_engine import SCOPE, ids, make_engine, random_tokens, reference, same_logits

from leyline_engine.contract import (
    Directive,
    EditPayload,
    LineageRun,
    Mode,
    Outcome,
    Reason,
    SourceRef,
    apply_directives,
    lower_directives,
    token_digest,
)
from leyline_replay.engine import GenerationRequest, PoolExhaustedError
from leyline_replay.sequence import Sequence

SESSIONS = ("a", "b", "c")
ROOM = 4
# Few different stems, so that sessions share prefixes.
STEMS = (random_tokens(70, 1), random_tokens(60, 2))


@dataclass
class Turn:
    """A finished turn as its caller knows it."""

    name: str
    tokens: list[int]
    lineage: tuple[LineageRun, ...]


@dataclass(eq=False)
class Job:
    """A running sequence and what has been fed to it."""

    sequence: Sequence
    session: str
    tokens: list[int]
    logits: torch.Tensor | None = None
    decoded: int = 0


class EngineMachine(RuleBasedStateMachine):
    """One engine, three sessions, up to five running requests."""

    page = 1

    @initialize(kind=st.sampled_from(["gqa", "mla"]))
    def start(self, kind: str) -> None:
        self.kind = kind
        self.engine = make_engine(kind, pool=330, page=self.page, chunk=24)
        self.turns: dict[str, list[Turn]] = {name: [] for name in SESSIONS}
        self.jobs: list[Job] = []
        self.count = 0

    def _admit(self, tokens: list[int], payload: EditPayload | None) -> Job | None:
        free_before = self.engine.stats()
        request = GenerationRequest(str(self.count), ids(tokens), payload, max_new_tokens=ROOM)
        try:
            sequence = self.engine.admit(request)
        except PoolExhaustedError:
            assert self.jobs
            assert self.engine.stats().in_flight == free_before.in_flight
            return None
        receipt = sequence.receipt
        counts = receipt.tokens
        assert counts.prefix + counts.spliced + counts.prefilled == counts.prompt == len(tokens)
        assert (receipt.outcome is Outcome.SPLICED) == (counts.spliced > 0)
        assert not counts.spliced or receipt.lineage
        job = Job(sequence, payload.session if payload else "", list(tokens))
        self.jobs.append(job)
        return job

    @precondition(lambda self: len(self.jobs) < 5)
    @rule(
        session=st.sampled_from(["", *SESSIONS]),
        stem=st.sampled_from(STEMS),
        cut=st.integers(1, 70),
        tail=st.lists(st.integers(1, 5), max_size=4),
        extend=st.booleans(),
    )
    def begin(self, session: str, stem: list[int], cut: int, tail: list[int], extend: bool) -> None:
        self.count += 1
        tokens = [*stem[:cut], *tail]
        lineage: tuple[LineageRun, ...] = ()
        turns = self.turns.get(session, [])
        if extend and turns and len(turns[-1].tokens) < 100:
            tokens, lineage = [*turns[-1].tokens, *tail, 7], turns[-1].lineage
        payload = None
        if session:
            payload = EditPayload(
                session=session, scope=SCOPE, turn=f"t{self.count}", lineage=lineage
            )
        job = self._admit(tokens, payload)
        if job is not None:
            assert job.sequence.receipt.outcome is Outcome.UNEDITED
            assert set(job.sequence.lineage) <= set(lineage)

    @precondition(lambda self: len(self.jobs) < 5 and any(self.turns.values()))
    @rule(data=st.data(), mode=st.sampled_from([Mode.AMORTIZE, Mode.AMORTIZE, Mode.FORGET]))
    def begin_edit(self, data: st.DataObject, mode: Mode) -> None:
        self.count += 1
        session = data.draw(st.sampled_from([s for s in SESSIONS if self.turns[s]]))
        turn = data.draw(st.sampled_from(self.turns[session]))
        cuts = sorted(data.draw(st.sets(st.integers(0, len(turn.tokens)), max_size=4)))
        directives = [
            Directive(s, t, tuple(data.draw(st.lists(st.integers(1, 5), max_size=2))), mode)
            for s, t in zip(cuts[::2], cuts[1::2], strict=False)
        ]
        tokens = [*apply_directives(turn.tokens, directives), 9]
        payload = EditPayload(
            session=session,
            scope=SCOPE,
            turn=f"t{self.count}",
            sources=(SourceRef(turn.name, len(turn.tokens), token_digest(turn.tokens)),),
            directives=tuple(directives),
            segments=lower_directives(directives, len(turn.tokens), len(tokens)),
            lineage=turn.lineage if data.draw(st.booleans()) else (),
            sink=data.draw(st.sampled_from([0, 8, 32])),
        )
        job = self._admit(tokens, payload)
        if job is None:
            return
        receipt = job.sequence.receipt
        assert receipt.reason in {
            Reason.SPLICED,
            Reason.REPREFILLED,
            Reason.MISSING_SOURCE,
            Reason.SOURCE_EVICTED,
            Reason.NOTHING_TO_REUSE,
        }
        if directives and mode is Mode.FORGET:
            self.turns[session] = []

    @precondition(lambda self: self.jobs)
    @rule(which=st.integers(0, 4), steps=st.integers(1, 5))
    def step(self, which: int, steps: int) -> None:
        job = self.jobs[which % len(self.jobs)]
        for _ in range(steps):
            if job.logits is not None:
                return
            job.logits = job.sequence.prefill_step()
            self.engine.check_integrity()
        if job.logits is not None:
            self._compare(job)

    @precondition(lambda self: any(job.logits is not None for job in self.jobs))
    @rule(which=st.integers(0, 4))
    def decode(self, which: int) -> None:
        ready = [job for job in self.jobs if job.logits is not None and job.decoded < ROOM]
        if not ready:
            return
        job = ready[which % len(ready)]
        assert job.logits is not None
        token = int(job.logits.argmax())
        try:
            job.logits = job.sequence.decode_step(token)
        except PoolExhaustedError:
            return
        job.tokens.append(token)
        job.decoded += 1
        self._compare(job)

    def _compare(self, job: Job) -> None:
        assert job.logits is not None
        if not job.sequence.receipt.lineage:
            assert same_logits(job.logits, reference(job.tokens, self.kind))

    @precondition(lambda self: any(job.logits is not None for job in self.jobs))
    @rule(which=st.integers(0, 4), unfed=st.booleans())
    def finish(self, which: int, unfed: bool) -> None:
        ready = [job for job in self.jobs if job.logits is not None]
        job = ready[which % len(ready)]
        assert job.logits is not None
        last = int(job.logits.argmax()) if unfed else None
        record = job.sequence.finish(last)
        self.jobs.remove(job)
        tokens = job.tokens + ([last] if last is not None else [])
        assert list(record.output_ids) == tokens[record.receipt.tokens.prompt :]
        if job.session and record.receipt.turn:
            turn = Turn(record.receipt.turn, tokens, record.receipt.lineage)
            self.turns[job.session] = [*self.turns[job.session], turn][-4:]

    @precondition(lambda self: self.jobs)
    @rule(which=st.integers(0, 4))
    def abort(self, which: int) -> None:
        self.jobs.pop(which % len(self.jobs)).sequence.abort()

    @rule()
    def flush(self) -> None:
        self.engine.flush()

    @invariant()
    def adds_up(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.check_integrity()
        check_levels(self.engine)
        for node in self.engine.cache.tree.nodes():
            assert node.locks >= sum(child.locks for child in node.children.values())
            assert not node.detached

    def teardown(self) -> None:
        for job in getattr(self, "jobs", []):
            job.sequence.abort()
        if hasattr(self, "engine"):
            self.engine.flush()
            self.engine.check_integrity()
            stats = self.engine.stats()
            assert stats.free == stats.capacity
            assert all(node.locks == 0 for node in self.engine.cache.tree.nodes())


TestEngine = EngineMachine.TestCase
TestEngine.settings = settings(max_examples=examples(25), stateful_step_count=30, deadline=None)
