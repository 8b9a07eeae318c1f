"""The engine that serves a session, before scripted engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from support.fake_engine import MODEL, FakeEngine
from support.replicas import replica_over

from leyline_proxy.errors import NotFoundError
from leyline_proxy.upstream.pool import ReplicaPool
from leyline_proxy.upstream.rendezvous import ranked
from leyline_proxy.upstream.replica import Replica

NAMES = ("a", "b", "c")


@dataclass
class Engines:
    """Scripted engines and a pool of them; ``down`` names those that refuse connections."""

    models: dict[str, list[str]] = field(default_factory=dict)
    down: set[str] = field(default_factory=set)

    def pool(self, names: Sequence[str] = NAMES) -> ReplicaPool:
        return ReplicaPool([self._replica(name) for name in names])

    def _replica(self, name: str) -> Replica:
        engine = FakeEngine()
        engine.models = self.models.get(name, [MODEL])

        async def app(scope: object, receive: object, send: object) -> None:
            if name in self.down:
                raise ConnectionError("scripted")
            await engine(scope, receive, send)  # type: ignore[arg-type]

        return replica_over(app, name)


def best(key: str, names: Sequence[str] = NAMES) -> str:
    return ranked(key, dict.fromkeys(names, 1.0))[0]


def key_of(name: str) -> str:
    """A session that belongs to ``name``."""
    return next(key for key in map(str, range(1000)) if best(key) == name)


async def test_a_session_stays_with_its_engine_while_that_is_up() -> None:
    """Every request of a session goes to the engine that its id ranks first."""
    pool = Engines().pool()
    await pool.refresh()
    for number in range(50):
        chosen = await pool.choose(str(number), MODEL)
        assert chosen.name == best(str(number))


async def test_sessions_of_an_engine_that_goes_down_spread_and_come_back() -> None:
    """Only its own sessions move, to the next of each one's order, until it is up again."""
    engines = Engines()
    pool = engines.pool()
    await pool.refresh()
    engines.down.add("b")
    await pool.refresh()
    for number in range(50):
        order = ranked(str(number), dict.fromkeys(NAMES, 1.0))
        chosen = await pool.choose(str(number), MODEL)
        assert chosen.name == next(name for name in order if name != "b")
    engines.down.clear()
    await pool.refresh()
    assert (await pool.choose(key_of("b"), MODEL)).name == "b"


async def test_an_engine_that_is_back_is_found_before_the_handshake_says_so() -> None:
    """If none is known to be up, each is asked once more before a request is given up."""
    engines = Engines(down=set(NAMES))
    pool = engines.pool()
    await pool.refresh()
    engines.down.discard("c")
    assert (await pool.choose(key_of("a"), MODEL)).name == "c"


async def test_without_any_engine_the_best_ranked_one_is_left_to_fail() -> None:
    """The caller gets a failure of its own engine, not a report that none is there."""
    pool = Engines(down=set(NAMES)).pool()
    await pool.refresh()
    assert (await pool.choose(key_of("a"), MODEL)).name == "a"


async def test_a_model_is_served_by_the_engines_that_list_it() -> None:
    """Engines of other models are passed over, whatever their rank."""
    pool = Engines(models={"a": ["x"], "b": ["y"], "c": ["y"]}).pool()
    await pool.refresh()
    for number in range(20):
        assert (await pool.choose(str(number), "x")).name == "a"
        assert (await pool.choose(str(number), "y")).name == best(str(number), ("b", "c"))
    with pytest.raises(NotFoundError, match="Known: 'x', 'y'"):
        await pool.check_model("z")


async def test_a_draining_engine_takes_no_session_that_another_can_have() -> None:
    """Its sessions move at their next turn; where it is the only one, it serves on."""
    pool = Engines().pool()
    await pool.refresh()
    drained = pool.get("a")
    assert drained is not None
    drained.draining = True
    assert (await pool.choose(key_of("a"), MODEL)).name != "a"
    assert (await pool.choose(key_of("a"), MODEL, allowed={"a"})).name == "a"


async def test_a_tenant_is_kept_to_its_engines() -> None:
    """An engine that isn't the tenant's is never chosen, not even when its own are down."""
    engines = Engines(down={"b"})
    pool = engines.pool()
    await pool.refresh()
    for number in range(20):
        assert (await pool.choose(str(number), MODEL, allowed={"b"})).name == "b"
    with pytest.raises(NotFoundError, match="No upstream"):
        await pool.choose("s", MODEL, allowed=frozenset())


async def test_an_open_circuit_is_passed_over_like_an_engine_that_is_down() -> None:
    """An engine that answers the handshake and fails requests loses its sessions for a while."""
    pool = Engines().pool()
    await pool.refresh()
    failing = pool.get("a")
    assert failing is not None
    for _ in range(3):
        failing.breaker.failed()
    assert (await pool.choose(key_of("a"), MODEL)).name != "a"
    assert (await pool.choose(key_of("a"), MODEL, avoid={"b", "c"})).name == "a"


def test_a_pool_needs_engines_with_names_of_their_own() -> None:
    """None, or two of one name, is a mistake that shows at the start."""
    with pytest.raises(ValueError, match="name of its own"):
        Engines().pool(())
    with pytest.raises(ValueError, match="name of its own"):
        Engines().pool(("a", "a"))
