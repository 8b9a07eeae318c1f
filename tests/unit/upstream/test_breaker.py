"""The circuit breaker as a machine of states."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.clock import Clock

from leyline_proxy.upstream.breaker import Breaker, BreakerState

THRESHOLD, PAUSE_S, LONGEST_S = 3, 2.0, 16.0


def breaker(clock: Clock) -> Breaker:
    return Breaker(threshold=THRESHOLD, pause_s=PAUSE_S, longest_pause_s=LONGEST_S, clock=clock)


def opened(clock: Clock) -> Breaker:
    found = breaker(clock)
    for _ in range(THRESHOLD):
        found.begin()
        found.failed()
    return found


def test_failures_in_a_row_open_the_circuit_and_a_success_between_them_doesnt_count() -> None:
    """Only that many failures without an answer in between open it."""
    found = breaker(Clock(100.0))
    for _ in range(2 * THRESHOLD):
        found.failed()
        found.succeeded()
    assert found.state is BreakerState.CLOSED
    for _ in range(THRESHOLD):
        assert found.state is BreakerState.CLOSED
        found.failed()
    assert found.state is BreakerState.OPEN and not found.admits


def test_after_the_pause_one_trial_is_let_through() -> None:
    """While the trial runs nothing else is sent; one that is given up makes room for another."""
    clock = Clock(100.0)
    found = opened(clock)
    clock.now += PAUSE_S
    assert found.admits
    found.begin()
    assert not found.admits
    found.given_up()
    assert found.admits
    found.begin()
    found.succeeded()
    assert found.state is BreakerState.CLOSED and found.admits


def test_each_failed_trial_doubles_the_pause_up_to_the_longest() -> None:
    """A dead engine is tried ever more seldom, but never given up."""
    clock = Clock(100.0)
    found = opened(clock)
    for pause in (2.0, 4.0, 8.0, 16.0, 16.0):
        clock.now += pause - 0.01
        assert not found.admits
        clock.now += 0.01
        assert found.admits
        found.begin()
        found.failed()
    clock.now += LONGEST_S
    found.begin()
    found.succeeded()
    for _ in range(THRESHOLD):
        found.failed()
    clock.now += PAUSE_S
    assert found.admits, "an engine that has recovered begins with the short pause again"


class Machine(RuleBasedStateMachine):
    """Any order of requests, ends and time."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock(100.0)
        self.breaker = breaker(self.clock)
        self.under_way = 0
        self.failures = 0

    @rule(seconds=st.floats(0.1, 30.0))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @precondition(lambda self: self.breaker.admits)
    @rule()
    def begin(self) -> None:
        self.breaker.begin()
        self.under_way += 1

    @precondition(lambda self: self.under_way)
    @rule(end=st.sampled_from(["succeeded", "failed", "given_up"]))
    def end(self, end: str) -> None:
        getattr(self.breaker, end)()
        self.under_way -= 1
        self.failures = {"succeeded": 0, "failed": self.failures + 1}.get(end, self.failures)

    @invariant()
    def opens_by_failures_alone(self) -> None:
        if self.failures == 0:
            assert self.breaker.state is BreakerState.CLOSED
        if self.breaker.state is BreakerState.CLOSED:
            assert self.failures < THRESHOLD

    @invariant()
    def is_never_shut_for_good(self) -> None:
        if not self.under_way:
            ahead = Clock(100.0)
            ahead.now, before = self.clock.now + LONGEST_S, self.clock.now
            self.clock.now = ahead.now
            admits = self.breaker.admits
            self.clock.now = before
            assert admits


TestMachine = Machine.TestCase
TestMachine.__doc__ = "No order of requests and ends opens it without cause or for good."
