"""The contract of stores of evicted texts, over memory, Redis, a folder and an object store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from parts_kit import BLUE, LIMITS, NEW, OLD, RED, START, Between, Broken, Place, part, store_over
from support.clock import Clock

from leyline_proxy.model.parts import FoundParts
from leyline_proxy.parts import store as part_store
from leyline_proxy.parts.limits import FLOOR_S, PartLimits, PartStoreError
from leyline_proxy.parts.marks import Mark, WrittenMark, joined
from leyline_proxy.parts.names import mark_name, time_of
from leyline_proxy.parts.sealing import PartSeal
from leyline_proxy.parts.store import PartStore

A, B = part("first output"), part("second output \ud83d", tool="r\udc80")


@pytest.fixture
def clock() -> Clock:
    """A clock of the tests."""
    return Clock(START)


@pytest.fixture
async def store(place: Place, clock: Clock) -> AsyncIterator[PartStore]:
    """A store over each kind of space."""
    made = store_over(place.open(), clock)
    yield made
    await made.aclose()


async def test_a_text_comes_back_whole_and_only_to_its_owner(store: PartStore) -> None:
    """A put text comes back with its facts to its session, and to nobody else by its address."""
    await store.put(RED, [A, B])
    found = await store.get(RED, [A.address, B.address, "sha256:other"])
    assert found.parts == {A.address: A, B.address: B}
    for other in (BLUE, ("red", "t"), ("", "red/s"), ("re", "ds")):
        assert await store.get(other, [A.address]) == FoundParts()
        assert not await store.listed(other)
    assert list(await store.listed(RED)) == sorted(
        (A.facts, B.facts), key=lambda each: each.address
    )


async def test_a_put_renews(store: PartStore, clock: Clock) -> None:
    """A text is gone after its time, which a later put begins again with the later facts."""
    await store.put(RED, [A, B])
    clock.now += 60
    again = part(A.text, turn="t-1", index=1)
    await store.put(RED, [again])
    clock.now += 60
    assert (await store.get(RED, [A.address, B.address])).parts == {A.address: again}
    assert [each.turn for each in await store.listed(RED)] == ["t-1"]
    clock.now += 60
    assert await store.get(RED, [A.address, B.address]) == FoundParts()
    await store.tidy()
    await store.put(("red", "t"), [B])  # in Redis, this removes what has expired
    assert await store.held(RED, 1) == (1, 0)


async def test_a_forget_reaches_what_was_planned_before(store: PartStore) -> None:
    """A forget removes texts and remembers them, refuses stale puts, and keeps its own turn's."""
    own = part("own", turn="t-f", forgets=True)
    later = part("later", demands=1)
    await store.put(RED, [A])
    await store.put(BLUE, [A])
    assert await store.forget(RED, turn="t-f", demands=0) == 1
    await store.put(RED, [B, own, later])
    found = await store.get(RED, [A.address, B.address, own.address, later.address])
    assert found.parts == {own.address: own, later.address: later}
    assert found.forgotten == {A.address}
    assert (await store.get(BLUE, [A.address])).parts == {A.address: A}
    assert await store.held(RED, 1) == (2, 0)
    # A text that the agent sends again can be recalled again.
    await store.put(RED, [part(A.text, demands=1)])
    found = await store.get(RED, [A.address])
    assert found.parts and not found.forgotten


async def test_forgets_of_two_turns_spare_neither(store: PartStore) -> None:
    """Two forgets on the same state reach each other's turn, and later ones add to what is known to
    be forgotten."""
    await store.put(RED, [part("x", turn="t-1", forgets=True)])
    await store.forget(RED, turn="t-1", demands=0)
    await store.forget(RED, turn="t-2", demands=0)
    await store.put(RED, [part("y", turn="t-2"), part("z", turn="t-1")])
    assert not await store.listed(RED)
    x, c = part("x").address, part("c", demands=1)
    await store.put(RED, [c])
    assert await store.forget(RED, turn="", demands=1) == 1
    assert (await store.get(RED, [x, c.address])).forgotten == {x, c.address}


async def test_a_floor_ends_but_not_for_what_it_reached(place: Place, clock: Clock) -> None:
    """Long after a forget, a new session of the same name may put, and a text whose deletion failed
    still can't be recalled."""
    limits = PartLimits(ttl_s=10 * FLOOR_S)
    broken = Broken(place.open())
    store = store_over(broken, clock, limits=limits)
    await store.put(RED, [A])
    broken.left = 4  # looks, writes the mark, looks, reads facts; no more
    with pytest.raises(PartStoreError):
        await store.forget(RED, turn="", demands=3)
    broken.left = None
    assert (await store.get(RED, [A.address])).forgotten == {A.address}
    assert (await store.held(RED, 4))[1] == 1
    clock.now += FLOOR_S + 1
    await store.put(RED, [B])
    found = await store.get(RED, [A.address, B.address])
    assert (set(found.parts), found.forgotten) == ({B.address}, {A.address})
    assert await store.forget(RED, turn="", demands=0) == 2
    assert await store.held(RED, 1) == (0, 0)
    await store.aclose()


async def test_a_deleted_session_leaves_nothing(store: PartStore, clock: Clock) -> None:
    """Deletion removes texts and what was forgotten, refuses turns planned before, and lets a new
    session of the name begin."""
    await store.put(RED, [A])
    await store.forget(RED, turn="", demands=5)
    await store.put(RED, [part("kept", demands=6)])
    clock.now += 1
    assert await store.delete(RED) == 1
    await store.put(RED, [part("late", demands=6, created=clock.now - 0.5)])
    assert await store.get(RED, [A.address, part("late").address]) == FoundParts()
    clock.now += 1
    new = part("new", created=clock.now)
    await store.put(RED, [new])
    assert (await store.get(RED, [new.address])).parts == {new.address: new}


async def test_a_forget_reaches_texts_of_a_clock_that_was_ahead(
    store: PartStore, clock: Clock
) -> None:
    """A clock that was hours ahead and is set back keeps no text from a forget."""
    clock.now += 5 * FLOOR_S
    early = part("early", created=clock.now)
    await store.put(RED, [early])
    clock.now = START
    assert await store.forget(RED, turn="", demands=0) == 1
    assert (await store.get(RED, [early.address])).forgotten == {early.address}
    assert await store.held(RED, 1) == (0, 0)


async def test_every_step_of_a_forget_may_fail(place: Place, clock: Clock) -> None:
    """Whichever operation of a forget fails, it says so, and from its mark on nothing comes back;
    the next try finishes it."""
    for steps in range(12):
        broken, owner = Broken(place.open()), ("red", f"s{steps}")
        store = store_over(broken, clock)
        await store.put(owner, [A, B])
        broken.left = steps
        try:
            await store.forget(owner, turn="", demands=0)
            finished = True
        except PartStoreError:
            finished = False
        broken.left = None
        found = await store.get(owner, [A.address, B.address])
        assert len(found.parts) == (2 if steps < 2 else 0)
        assert finished or steps < 11
        assert finished == ((await store.held(owner, 1))[1] == 0) or not finished
        await store.forget(owner, turn="", demands=0)
        assert (await store.get(owner, [A.address])).forgotten == {A.address}
        assert (await store.held(owner, 1))[1] == 0
        await store.aclose()
    assert finished


@pytest.mark.parametrize("seed", range(12))
async def test_a_stale_put_beside_a_forget(place: Place, clock: Clock, seed: int) -> None:
    """However a stale put and a forget interleave, nothing is recalled or held afterwards."""
    space = place.open()
    stale, forgets = (store_over(Between(space, seed * 2 + n), clock) for n in range(2))
    await stale.put(RED, [A])

    async def asked() -> None:
        await forgets.forget(RED, turn="", demands=0)
        assert not (await forgets.get(RED, [A.address, B.address])).parts

    await asyncio.gather(stale.put(RED, [B]), asked())
    assert not (await stale.get(RED, [A.address, B.address])).parts
    assert (await stale.held(RED, 1))[1] == 0
    await space.aclose()


async def test_without_its_second_look_a_put_leaves_a_survivor(
    place: Place, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The look of a put after its writing is what removes a text that a forget didn't see."""
    space = place.open()
    store = store_over(space, clock)
    look, looks = PartStore._look, []

    async def forgets_after_first(self: PartStore, owner: tuple[str, str]) -> object:
        found = await look(self, owner)
        looks.append(1)
        if len(looks) == 1:
            await store_over(space, clock).forget(owner, turn="", demands=0)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(PartStore, "_look", forgets_after_first)
        await store.put(RED, [A])
    assert (await store.held(RED, 1))[1] == 0
    planted = PartSeal((OLD,))
    name = f"p{planted.tags(RED, A.address)[0]}{round(START * 1000):012x}"
    entry = planted.close_part(RED, name, A)
    await space.write(planted.shelves(RED)[0], {name: entry}, 100)
    assert await store.held(RED, 1) == (1, 1)
    assert not (await store.get(RED, [A.address])).parts
    await space.aclose()


async def test_limits_are_each_tenants_own(place: Place, clock: Clock) -> None:
    """A tenant over its bytes loses its oldest, whichever session has them, and nobody else does; a
    text over its own limit is left out."""
    limits = PartLimits(ttl_s=100, tenant_bytes=11_000, part_bytes=4_000)
    store = store_over(place.open(), clock, limits=limits)
    texts = [part(str(number) * 3000) for number in range(6)]
    await store.put(BLUE, [A])
    for number, each in enumerate(texts):
        clock.now += 1
        await store.put(("red", f"s{number % 2}"), [each])
    await store.put(RED, [part("x" * 4000)])
    left = [
        address
        for owner in (("red", "s0"), ("red", "s1"))
        for address in (await store.get(owner, [each.address for each in texts])).parts
    ]
    assert set(left) == {each.address for each in texts[-3:]}
    assert not await store.listed(RED)
    assert (await store.get(BLUE, [A.address])).parts
    assert await store.held(("red", "s0"), 0) == (3, 0)
    await store.aclose()


async def test_a_session_has_so_many_parts_at_most(
    place: Place, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of more parts than a session may have, and of more than are listed, the newest remain."""
    monkeypatch.setattr(part_store, "MAX_PARTS", 4)
    monkeypatch.setattr(part_store, "MAX_LISTED", 3)
    store = store_over(place.open(), clock)
    for number in range(6):
        clock.now += 1
        await store.put(RED, [part(f"text {number}", index=number, created=clock.now)])
    assert await store.held(RED, 0) == (4, 0)
    assert [each.index for each in await store.listed(RED)] == [3, 4, 5]
    await store.aclose()


async def test_another_key_first_and_the_old_one_behind(place: Place, clock: Clock) -> None:
    """After a rotation old texts are found, forgotten and counted; without the old key, or with
    another one, nothing is found."""
    space = place.open()
    await store_over(space, clock, OLD).put(RED, [A, B])
    both = store_over(space, clock, NEW, OLD)
    c = part("third")
    clock.now += 1
    await both.put(RED, [c, A])
    wanted = [A.address, B.address, c.address]
    assert set((await both.get(RED, wanted)).parts) == set(wanted)
    assert set((await store_over(space, clock, NEW).get(RED, wanted)).parts) == {
        A.address,
        c.address,
    }
    assert not (await store_over(space, clock, "quite another key").get(RED, wanted)).parts
    # A proxy that still writes with the old key forgets for all that know it.
    await store_over(space, clock, OLD, NEW).forget(RED, turn="", demands=0)
    found = await both.get(RED, wanted)
    assert (found.parts, found.forgotten) == ({}, frozenset(wanted))
    assert await both.held(RED, 1) == (0, 0)
    await space.aclose()


async def test_an_unreadable_mark_hides_everything(store: PartStore, place: Place) -> None:
    """A mark that doesn't open reaches all that was put before: its forget may have meant it."""
    await store.put(RED, [part("x", demands=9)])
    space = place.open()
    name = mark_name(START)
    await space.write(PartSeal((OLD,)).shelves(RED)[0], {name: b"E" + bytes(60)}, 100)
    assert not (await store.get(RED, [part("x").address])).parts
    assert await store.forget(RED, turn="", demands=0) == 1
    await space.aclose()


def test_a_joined_mark_reaches_what_its_sources_did() -> None:
    """Marks join in either order to the same reach; one whose floor has ended isn't carried on."""
    low, high = Mark(1, "a", forgotten=("x",)), Mark(2, "b", forgotten=("y", "x"))
    first = joined(high, [WrittenMark(0, low)], 1)
    second = joined(low, [WrittenMark(0, high)], 1)
    assert (first.demands, first.turn) == (second.demands, second.turn) == (2, "b")
    assert set(first.forgotten) == set(second.forgotten) == {"x", "y"}
    ended = joined(low, [WrittenMark(0, high)], FLOOR_S + 1)
    assert (ended.demands, ended.turn) == (1, "a")
    assert joined(Mark(1, "a"), [WrittenMark(0, Mark(1, "b"))], 1).turn == ""
    assert joined(low, [WrittenMark(5, None)], 9).before == 5
    assert Mark.decoded(high.encoded()) == high
    assert Mark.decoded(b"[1]") is None
    assert time_of(mark_name(START)) == START
    assert LIMITS.ttl_s == 100
