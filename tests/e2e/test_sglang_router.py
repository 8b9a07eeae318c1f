"""SGLang's own router between proxy and engines: what a session reuses, by routing policy."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from leyline_lab.stand_ins.router import TRUNCATE, Fleet, Reuse, fleet, measure, router

TURNS = 4
POINT = 0.01
"""One percentage point of the prompt tokens."""


@pytest.fixture(scope="module")
def engines() -> Iterator[Fleet]:
    with fleet(4, policy=TRUNCATE) as found:
        yield found


@pytest.fixture(scope="module")
def direct(engines: Fleet) -> Reuse:
    """Sessions without a router."""
    return measure(engines.proxy(), 21, TURNS, tag="direct")


def through(engines: Fleet, policy: str, sessions: int = 21, turns: int = TURNS) -> Reuse:
    """Sessions through a router with a policy."""
    with router(policy, list(engines.origins.values())) as between:
        proxy = engines.proxy(between)
        found = measure(proxy, sessions, turns, tag=policy)
        kinds = proxy.kinds()
        assert sum(kinds.values()) == sessions * turns, kinds
        assert not kinds["unknown"] and not kinds["unrecorded"], kinds
        return found


def test_splices_survive_a_router_that_pins_the_proxys_key(engines: Fleet, direct: Reuse) -> None:
    """The reuse is that without a router; the proxy sends the key without being told to."""
    pinned = through(engines, "manual")
    assert direct.spliced > 0
    assert abs(pinned.ratio - direct.ratio) <= POINT, (pinned, direct)


@pytest.mark.nightly
def test_a_router_without_affinity_loses_the_splices(engines: Fleet, direct: Reuse) -> None:
    """The control: round robin takes most of a session's turns to engines without its KV."""
    spread = through(engines, "round_robin")
    assert spread.ratio < direct.ratio / 2, (spread, direct)
    assert spread.spliced < direct.spliced / 2, (spread, direct)


@pytest.mark.nightly
@pytest.mark.parametrize("policy", ["manual", "consistent_hashing"])
def test_two_hundred_sessions_reuse_as_much_behind_the_router(engines: Fleet, policy: str) -> None:
    """The same comparison at length, for both policies that read the key."""
    without = measure(engines.proxy(), 200, TURNS, tag=f"long-{policy}")
    behind = through(engines, policy, sessions=200)
    assert abs(behind.ratio - without.ratio) <= POINT, (behind, without)
