"""The fair queue: who is let in next, for all orders of coming and going."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from leyline_proxy.admission.bucket import TokenBucket
from leyline_proxy.admission.fair_queue import Arrival, FairQueue, Share

WEIGHTS = st.sampled_from([0.25, 1.0, 2.0, 5.0])


def serve(queue: FairQueue[int]) -> str:
    """Grant one place, and give it back at once; whose it was."""
    granted = queue.grant()
    assert granted is not None
    queue.release(granted[0])
    return granted[0]


@given(st.lists(WEIGHTS, min_size=2, max_size=5), st.integers(1, 200))
def test_shares_of_tenants_that_always_wait_are_their_weights(
    weights: list[float], served: int
) -> None:
    """After any number of requests, no two are further apart than one request of each."""
    queue: FairQueue[int] = FairQueue(1)
    queue.enter("first", -1, Share())
    for ticket in range(served):
        for index, weight in enumerate(weights):
            share = Share(weight, max_waiting=served)
            assert queue.enter(str(index), ticket * len(weights) + index, share) is Arrival.WAITS
    queue.release("first")
    counts = Counter(serve(queue) for _ in range(served))
    shares = [counts[str(index)] / weight for index, weight in enumerate(weights)]
    steps = sorted((1 / weight for weight in weights), reverse=True)
    assert max(shares) - min(shares) <= steps[0] + steps[1] + 1e-9


@given(WEIGHTS, st.integers(1, 100))
def test_no_tenant_starves(weight: float, crowd: int) -> None:
    """A request waits for no more than its share of the others', however many of them came first,
    also when the others have a hundred times its weight."""
    queue: FairQueue[int] = FairQueue(1)
    queue.enter("crowd", -1, Share(100.0))
    for ticket in range(crowd):
        queue.enter("crowd", ticket, Share(100.0, max_waiting=crowd))
    queue.enter("one", 1000, Share(weight))
    queue.release("crowd")
    served = [serve(queue) for _ in range(crowd + 1)]
    assert served.index("one") <= math.ceil(100 / weight) + 1
    assert served.index("one") <= 2, "it had nothing to do before, so it is next but one"


def test_idle_places_cost_nothing_later() -> None:
    """A tenant that had the proxy to itself is no worse off beside one that comes later."""
    queue: FairQueue[int] = FairQueue(1)
    for ticket in range(1000):
        assert queue.enter("early", ticket, Share()) is Arrival.RUNS
        queue.release("early")
    queue.enter("early", 1000, Share())
    for ticket in range(10):
        queue.enter("early", 2000 + ticket, Share())
        queue.enter("late", 3000 + ticket, Share())
    queue.release("early")
    served = Counter(serve(queue) for _ in range(10))
    assert abs(served["early"] - served["late"]) <= 1


def test_a_tenant_at_its_own_limit_leaves_places_to_others() -> None:
    """Its requests wait while places are free, and others overtake them."""
    queue: FairQueue[int] = FairQueue(3)
    share = Share(max_running=1)
    assert queue.enter("red", 1, share) is Arrival.RUNS
    assert queue.enter("red", 2, share) is Arrival.WAITS
    assert queue.grant() is None
    assert queue.enter("blue", 3, Share()) is Arrival.RUNS
    queue.release("red")
    assert queue.grant() == ("red", 2)


class Machine(RuleBasedStateMachine):
    """Any order of coming, leaving and ending, beside a plain account of it."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: FairQueue[int] = FairQueue(3)
        self.shares = {
            "a": Share(1.0, max_running=2, max_waiting=3),
            "b": Share(5.0, max_waiting=2),
            "c": Share(0.25, max_waiting=0),
        }
        self.waiting: dict[str, list[int]] = {name: [] for name in self.shares}
        self.running: Counter[str] = Counter()
        self.tickets = 0

    @rule(tenant=st.sampled_from("abc"))
    def enter(self, tenant: str) -> None:
        """A request comes."""
        self.tickets += 1
        entry = self.queue.enter(tenant, self.tickets, self.shares[tenant])
        share = self.shares[tenant]
        if entry is Arrival.RUNS:
            self.running[tenant] += 1
        elif entry is Arrival.WAITS:
            self.waiting[tenant].append(self.tickets)
        else:
            assert len(self.waiting[tenant]) == share.max_waiting

    @precondition(lambda self: sum(self.running.values()))
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        """A request ends, and its place is given on."""
        tenant = data.draw(st.sampled_from(sorted(self.running.elements())))
        self.queue.release(tenant)
        self.running[tenant] -= 1
        while granted := self.queue.grant():
            name, ticket = granted
            assert ticket == self.waiting[name].pop(0), "in the order they came"
            self.running[name] += 1

    @precondition(lambda self: any(self.waiting.values()))
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """One that waits goes away."""
        tenant = data.draw(st.sampled_from([name for name, held in self.waiting.items() if held]))
        ticket = data.draw(st.sampled_from(self.waiting[tenant]))
        assert self.queue.leave(tenant, ticket)
        assert not self.queue.leave(tenant, ticket)
        self.waiting[tenant].remove(ticket)

    @invariant()
    def keeps_its_books(self) -> None:
        """Numbers are right, limits are kept, and no place is free that someone could have."""
        assert self.queue.total_running == sum(self.running.values()) <= 3
        for name, share in self.shares.items():
            assert self.queue.running(name) == self.running[name]
            assert self.queue.waiting(name) == len(self.waiting[name]) <= share.max_waiting
            limit = share.max_running or 3
            assert self.running[name] <= limit
            if self.queue.total_running < 3 and self.running[name] < limit:
                assert not self.waiting[name]


TestFairQueue = Machine.TestCase


def test_tenants_that_are_gone_are_forgotten() -> None:
    """Names that came once leave no record."""
    queue: FairQueue[int] = FairQueue(1)
    for number in range(100):
        queue.enter(f"t{number}", number, Share())
        queue.release(f"t{number}")
    assert len(queue._lines) <= 1


@given(st.floats(0.1, 1000), st.lists(st.floats(0, 30), min_size=1, max_size=200))
def test_a_bucket_lets_no_more_pass_than_its_rate(rate: float, gaps: list[float]) -> None:
    """In any stretch of time it lets through a minute's worth, and what the rate gives
    meanwhile."""
    now, passed = 0.0, 0
    bucket = TokenBucket(rate, now)
    for gap in gaps:
        now += gap
        passed += bucket.take(now) == 0
    assert passed <= max(1.0, rate) + now * rate / 60 + 1e-6


@given(st.floats(0.1, 1000))
def test_a_bucket_says_when_to_come_back(rate: float) -> None:
    """After the time it names there is a token, and a little before there is none."""
    bucket = TokenBucket(rate, 0.0)
    while (wait := bucket.take(0.0)) == 0:
        pass
    assert bucket.take(wait * 0.99) > 0
    assert bucket.take(wait * 1.0001) == pytest.approx(0)
