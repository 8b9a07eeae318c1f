"""Stores of evicted texts against a simple model, under random sequences of operations."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from parts_kit import KINDS, NEW, OLD, START, Place, address_of, part, store_over
from support.clock import Clock

from leyline_proxy.model.parts import StoredPart
from leyline_proxy.parts.limits import FLOOR_S, PartLimits

OWNERS = (("red", "s"), ("red", "t"), ("blue", "s"))
LETTERS = "abcde"
LENGTH = 3000
MOST = 3
"""Texts of one tenant that fit into the limit."""

LIMITS = PartLimits(ttl_s=2 * FLOOR_S, tenant_bytes=11_500, part_bytes=4_000)


@dataclass
class Known:
    """The model of one session."""

    parts: dict[str, tuple[StoredPart, float]] = field(default_factory=dict)
    forgets: list[tuple[float, int, str]] = field(default_factory=list)
    """Time, demands and turn of each."""
    deleted: list[float] = field(default_factory=list)
    tombs: dict[str, float] = field(default_factory=dict)
    demands: int = 0
    barred: set[str] = field(default_factory=set)
    closed: bool = False
    marked: float = 0.0
    """Time of the last mark."""

    def expire(self, now: float) -> None:
        """Lose what the last mark said, once it has expired."""
        if self.marked + LIMITS.ttl_s + FLOOR_S <= now:
            self.barred, self.closed = set(), False

    def mark(self, now: float) -> None:
        """Write a mark, which repeats what others say."""
        self.marked, lives = now, LIMITS.ttl_s + FLOOR_S
        self.tombs = {each: now for each, at in self.tombs.items() if at + lives > now}

    def refuses(self, given: StoredPart, now: float) -> bool:
        """True if an earlier forget reaches a text that is put now."""
        if self.closed or not self.barred.isdisjoint({given.address, *given.sources}):
            return True
        forgot = any(
            given.demands <= demands and given.turn != turn and now <= at + FLOOR_S
            for at, demands, turn in self.forgets
        )
        return forgot or any(given.created <= at and now <= at + FLOOR_S for at in self.deleted)


class PartStoreMachine(RuleBasedStateMachine):
    """Plays operations of two tenants to a store and to the model."""

    def __init__(self, make: Callable[[], Place]) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.clock = Clock(START)
        self.space_place = make()
        self.known = {owner: Known() for owner in OWNERS}
        self.keys: tuple[str, ...] = (OLD,)

    @initialize()
    def opens(self) -> None:
        """The first proxy."""
        self.store = store_over(self.space_place.open(), self.clock, *self.keys, limits=LIMITS)

    def teardown(self) -> None:
        self.runner.run(self.store.aclose())
        self.runner.close()

    @rule()
    def restart(self) -> None:
        """Another proxy takes over."""
        self.runner.run(self.store.aclose())
        self.opens()

    @rule()
    def rotate(self) -> None:
        """A new key comes first."""
        self.keys = (NEW, OLD)
        self.restart()

    @rule(seconds=st.sampled_from([1.5, FLOOR_S / 2, FLOOR_S + 1, 2 * FLOOR_S + 1]))
    def wait(self, seconds: float) -> None:
        """Time passes."""
        self.clock.now += seconds

    @rule()
    def tidy(self) -> None:
        """Expired entries are removed; nobody notices."""
        self.runner.run(self.store.tidy())

    @rule(
        owner=st.sampled_from(OWNERS),
        letter=st.sampled_from(LETTERS),
        turn=st.sampled_from("xyz"),
        stale=st.integers(0, 2),
        age=st.sampled_from([0.0, 5.0]),
        source=st.sampled_from(["", *LETTERS]),
    )
    def put(
        self,
        owner: tuple[str, str],
        letter: str,
        *,
        turn: str,
        stale: int,
        age: float,
        source: str,
    ) -> None:
        """A turn puts a text; perhaps one that was planned before forgets or deletions."""
        self.clock.now += 0.01
        now, own = self.clock.now, self.known[owner]
        demands = max(0, own.demands - stale)
        sources = (address_of(source * LENGTH),) if source else ()
        facts = {"turn": f"{turn}{demands}", "demands": demands, "created": now - age}
        given = part(letter * LENGTH, sources=sources, **facts)
        self.runner.run(self.store.put(owner, [given]))
        own.expire(now)
        if own.refuses(given, now):
            return
        if (own.barred or own.closed) and own.marked + LIMITS.ttl_s / 2 < now:
            own.mark(now)
        own.parts[given.address] = (given, now)
        tenant = [
            (at, name, address)
            for name in OWNERS
            if name[0] == owner[0]
            for address, (_, at) in self.known[name].parts.items()
            if at + LIMITS.ttl_s > now
        ]
        for _, name, address in sorted(tenant)[:-MOST]:
            del self.known[name].parts[address]

    @rule(owner=st.sampled_from(OWNERS), turn=st.sampled_from(["", "x", "y"]), again=st.booleans())
    def forget(self, owner: tuple[str, str], turn: str, again: bool) -> None:
        """A turn, or a demand without one, makes a session forget; or two do at the same time."""
        self.clock.now += 0.01
        now, own = self.clock.now, self.known[owner]
        demands = own.demands - 1 if again and own.demands else own.demands
        own.demands = demands + 1
        turn = turn and f"{turn}{demands}"
        self.runner.run(self.store.forget(owner, turn=turn, demands=demands))
        own.expire(now)
        own.forgets.append((now, demands, turn))
        for address, (given, at) in list(own.parts.items()):
            if given.demands <= demands and given.turn != (turn or None):
                del own.parts[address]
                if at + LIMITS.ttl_s > now:
                    own.tombs[address] = now
        own.mark(now)

    @rule(owner=st.sampled_from(OWNERS), letters=st.sampled_from(["a", "b", "cde", None]))
    def bar(self, owner: tuple[str, str], letters: str | None) -> None:
        """A session forgets texts for good, or more than it can remember."""
        self.clock.now += 0.01
        now, own = self.clock.now, self.known[owner]
        addresses = None if letters is None else {address_of(each * LENGTH) for each in letters}
        self.runner.run(self.store.bar(owner, addresses))
        own.expire(now)
        own.barred |= addresses or set()
        own.closed |= addresses is None
        for address, (given, at) in list(own.parts.items()):
            if own.closed or not own.barred.isdisjoint({address, *given.sources}):
                del own.parts[address]
                if at + LIMITS.ttl_s > now:
                    own.tombs[address] = now
        own.mark(now)

    @rule(owner=st.sampled_from(OWNERS))
    def delete(self, owner: tuple[str, str]) -> None:
        """A session is deleted; the next one of its name begins."""
        self.clock.now += 0.01
        self.runner.run(self.store.delete(owner))
        self.known[owner] = Known(deleted=[self.clock.now])

    @invariant()
    def agrees(self) -> None:
        """The store has what the model has, and shows nobody more."""
        now = self.clock.now
        for owner, own in self.known.items():
            asked = [address_of(letter * LENGTH) for letter in LETTERS]
            found = self.runner.run(self.store.get(owner, asked))
            live = {a: p for a, (p, at) in own.parts.items() if at + LIMITS.ttl_s > now}
            assert dict(found.parts) == live
            lives = LIMITS.ttl_s + FLOOR_S
            tombs = {address for address, at in own.tombs.items() if at + lives > now}
            own.expire(now)
            barred = set(asked) if own.closed else own.barred
            assert found.forgotten == (tombs | barred) - live.keys()
            known = self.runner.run(self.store.barred(owner))
            assert known.everything == own.closed
            assert own.closed or known.addresses == own.barred
            listed = self.runner.run(self.store.listed(owner))
            assert {each.address for each in listed} == live.keys()
            assert self.runner.run(self.store.held(owner, 0))[1] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_store_agrees_with_the_model(place_of: Callable[[str], Place], kind: str) -> None:
    """Over each kind of space, the store does what the model does, stale puts included."""
    run_state_machine_as_test(
        lambda: PartStoreMachine(lambda: place_of(kind)),
        settings=settings(
            max_examples=4 if kind == "redis" else 12, stateful_step_count=25, deadline=None
        ),
    )


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
def test_the_store_agrees_with_the_model_for_long(
    place_of: Callable[[str], Place], kind: str
) -> None:
    """The same with many more and longer sequences."""
    run_state_machine_as_test(
        lambda: PartStoreMachine(lambda: place_of(kind)),
        settings=settings(max_examples=300, stateful_step_count=60, deadline=None),
    )
