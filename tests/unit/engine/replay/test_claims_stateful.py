"""Claims, turns, edits and forgets at random on a real engine, judged from its events alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from claims_kit import ALL, TENANT, ask, check_claims, make_claim, named, shipped, start, tokens
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support.examples import examples
from support.pool_levels import check_levels

from leyline_engine.claims.answers import UnknownClaimError
from leyline_engine.claims.events import AnyEvent, EventLedger
from leyline_engine.claims.states import FINAL, State
from leyline_engine.contract import (
    ClaimCommand,
    ClaimKind,
    ClaimReply,
    CopySegment,
    DemoteClaim,
    Directive,
    EditPayload,
    LineageRun,
    LiteralSegment,
    Mode,
    ReleaseClaim,
    SourceRef,
    SubmitClaim,
    token_digest,
)
from leyline_lab.claims.reader import read
from leyline_lab.claims.replay_watch import WatchedClaims
from leyline_replay.engine import RefusedByClaimError, ReplayEngine

POOL = 260
STEMS = (tokens(70, 1), tokens(60, 2))
SESSIONS = st.sampled_from(["a", "b"])
NAMES = st.sampled_from(["c1", "c2", "c3"])
RARELY = st.sampled_from([False] * 5 + [True])
TAILS = st.lists(st.integers(1, 9), min_size=1, max_size=6)


@dataclass
class Turn:
    """A retained turn as its caller knows it."""

    name: str
    session: str
    tokens: list[int]
    lineage: tuple[LineageRun, ...]


class ClaimedEngine(RuleBasedStateMachine):
    """One engine, two sessions, one request at a time."""

    page = 1

    def __init__(self) -> None:
        super().__init__()
        self.events: list[AnyEvent] = []
        ledger = EventLedger(sink=self.events.append)
        self.engine = ReplayEngine(
            shipped(),
            pool_tokens=POOL // self.page * self.page,
            page_tokens=self.page,
            chunk_tokens=64,
            open_claims=partial(WatchedClaims, limits=ALL, ledger=ledger),
        )
        self.turns: list[Turn] = []
        self.count = self.revision = self.ticks = self.now_ms = 0
        self.known: set[str] = set()

    def _run(self, prompt: list[int], payload: EditPayload, output: int, *, admits: bool) -> None:
        request = ask(prompt, payload, room=output, admits=admits)
        before = self.engine.stats()
        try:
            # Alone, a request that isn't refused finds its slots.
            sequence = start(self.engine, request)
        except RefusedByClaimError as error:
            assert error.refusal.own and not error.refusal.others
            assert error.forgot or self.engine.stats() == before
            return
        for token in range(1, output + 1):
            sequence.decode_step(token)
        receipt = sequence.finish(11).receipt
        if receipt.turn:
            whole = [*prompt, *range(1, output + 1), 11]
            self.turns.append(Turn(payload.turn, payload.session, whole, receipt.lineage))
            self.turns = self.turns[-8:]
        assert self.engine.stats().in_flight == 0 == self.engine.stats().doomed

    def _payload(self, session: str, **more: Any) -> EditPayload:
        self.count += 1
        return named(f"t{self.count}", session=session, **more)

    @rule(
        session=SESSIONS,
        stem=st.sampled_from(STEMS),
        cut=st.integers(1, 70),
        tail=TAILS,
        output=st.integers(0, 4),
        no_admit=RARELY,
    )
    def turn(self, session: str, stem: list[int], cut: int, no_admit: bool, **more: Any) -> None:
        """A prompt that others may have begun, too."""
        prompt = [*stem[:cut], *more["tail"]]
        self._run(prompt, self._payload(session), more["output"], admits=not no_admit)

    @precondition(lambda self: self.turns)
    @rule(which=st.integers(0, 7), tail=TAILS, output=st.integers(0, 4))
    def go_on(self, which: int, tail: list[int], output: int) -> None:
        """The session's next turn."""
        turn = self.turns[which % len(self.turns)]
        payload = self._payload(turn.session, lineage=turn.lineage)
        self._run([*turn.tokens[:110], *tail], payload, output, admits=True)

    @precondition(lambda self: self.turns)
    @rule(which=st.integers(0, 7), start=st.integers(0, 90), length=st.integers(1, 30), tail=TAILS)
    def edit(self, which: int, start: int, length: int, tail: list[int]) -> None:
        """A turn that leaves a part of another out."""
        turn = self.turns[which % len(self.turns)]
        start %= len(turn.tokens)
        end = min(start + length, len(turn.tokens))
        prompt = [*turn.tokens[:start], *turn.tokens[end:], *tail]
        payload = self._payload(
            turn.session,
            sources=(SourceRef(turn.name, len(turn.tokens), token_digest(turn.tokens)),),
            segments=(
                CopySegment(0, 0, start, 0),
                CopySegment(0, end, len(turn.tokens), start),
                LiteralSegment(len(prompt) - len(tail), len(tail)),
            ),
            lineage=turn.lineage,
        )
        self._run(prompt, payload, 2, admits=True)

    @precondition(lambda self: self.turns)
    @rule(which=st.integers(0, 7), start=st.integers(0, 90), length=st.integers(1, 30), tail=TAILS)
    def forget(self, which: int, start: int, length: int, tail: list[int]) -> None:
        """A turn that has a part of another forgotten."""
        turn = self.turns[which % len(self.turns)]
        start %= len(turn.tokens)
        end = min(start + length, len(turn.tokens))
        prompt = [*turn.tokens[:start], *turn.tokens[end:], *tail]
        payload = self._payload(
            turn.session,
            sources=(SourceRef(turn.name, len(turn.tokens), token_digest(turn.tokens)),),
            directives=(Directive(start, end, (), Mode.FORGET),),
        )
        self.turns = [kept for kept in self.turns if kept.session != turn.session]
        self._run(prompt, payload, 1, admits=True)

    @precondition(lambda self: self.turns)
    @rule(
        which=st.integers(0, 7),
        name=NAMES,
        first=st.integers(0, 110),
        length=st.integers(1, 110),
        share=st.sampled_from([0.3, 1.0, 1.0]),
        kind=st.sampled_from(ClaimKind),
        priority=st.integers(0, 3),
        ttl_s=st.none() | st.integers(1, 5),
        write_no_admit=RARELY,
        late=RARELY,
    )
    def claim(
        self, which: int, name: str, first: int, length: int, late: bool, **terms: Any
    ) -> None:
        """New, a revision, or one that comes too late."""
        turn = self.turns[which % len(self.turns)]
        first %= len(turn.tokens) - 1
        end = min(first + length, len(turn.tokens) - 1)
        self.revision += 1
        revision = max(1, self.revision - 5) if late else self.revision
        self.known.add(name)
        asked = make_claim(
            turn.name, end, first, id=name, session=turn.session, revision=revision, **terms
        )
        self._do(SubmitClaim(asked))

    @rule(name=NAMES, demote=st.booleans())
    def let_go(self, name: str, demote: bool) -> None:
        """Of locks alone, or of all."""
        self._do(DemoteClaim(TENANT, name) if demote else ReleaseClaim(TENANT, name))

    @rule(seconds=st.integers(0, 3))
    def tick(self, seconds: int) -> None:
        """Let time pass."""
        self.ticks += 1
        self.now_ms += 1000 * seconds
        self.engine.claims.keeper.tick(self.ticks, self.now_ms)

    def _do(self, command: ClaimCommand) -> ClaimReply:
        return self.engine.claims.keeper.carry_out(command)

    @invariant()
    def the_pool_is_whole(self) -> None:
        """Every slot has one owner; what claims lock is what the book says."""
        self.engine.check_integrity()
        check_claims(self.engine)
        check_levels(self.engine)

    @invariant()
    def promises_are_kept(self) -> None:
        """Each live claim has what it requires."""
        for status in self.engine.claims.keeper.book.live():
            assert status.resident_tokens >= status.required_tokens
            assert status.remaining_ms is None or status.remaining_ms > 0

    @invariant()
    def events_alone_tell_the_same(self) -> None:
        """The reader finds no contradiction, and the same pool and states."""
        verdict = read(self.events)
        assert verdict.void == "" and verdict.balance is not None, verdict.void
        stats = self.engine.stats()
        assert verdict.balance.free == stats.free // self.page
        assert sum(verdict.balance.resident.values()) * self.page == stats.cached
        assert verdict.balance.locked == self.engine.claims.keeper.book.protected_pages
        assert verdict.balance.running == verdict.balance.unfinished == ()
        for name in self.known:
            state = self._state(name)
            assert verdict.balance.claims.get(f"{TENANT}/{name}", State.REJECTED) == state

    def _state(self, name: str) -> State:
        return self.engine.claims.keeper.book.status(TENANT, name).state

    def teardown(self) -> None:
        """Everything is let go; nothing stays locked, ranked or unevictable."""
        for name in self.known:
            self._do(ReleaseClaim(TENANT, name))
            assert self._state(name) in FINAL
        with pytest.raises(UnknownClaimError):
            self._state("never")
        shelf = self.engine.claims.shelf
        assert shelf.locked() == [] and not shelf._ranks
        self.engine.flush()
        assert self.engine.stats().free == self.engine.cache.capacity


class PagedEngine(ClaimedEngine):
    """The same with pages of 16 tokens."""

    page = 16


def test_the_engine_keeps_its_promises_whatever_comes() -> None:
    """Conservation, protection, and a trace that shows it all."""
    run_state_machine_as_test(
        ClaimedEngine,
        settings=settings(max_examples=examples(40), stateful_step_count=25, deadline=None),
    )


def test_the_engine_keeps_its_promises_on_pages() -> None:
    """The same where the tree has whole pages only."""
    run_state_machine_as_test(
        PagedEngine,
        settings=settings(max_examples=examples(25), stateful_step_count=25, deadline=None),
    )


@pytest.mark.nightly
@pytest.mark.parametrize("machine", [ClaimedEngine, PagedEngine])
def test_the_engine_keeps_its_promises_for_longer(machine: type[ClaimedEngine]) -> None:
    """The same over many and longer histories."""
    run_state_machine_as_test(
        machine, settings=settings(max_examples=200, stateful_step_count=50, deadline=None)
    )
