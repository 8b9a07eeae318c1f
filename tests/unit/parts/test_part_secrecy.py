"""Evicted texts at rest: nothing in clear, nothing that opens elsewhere or damaged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parts_kit import KINDS, NEW, OLD, RED, START, Place, part, store_over
from support.clock import Clock

from leyline_proxy.model.parts import FoundParts
from leyline_proxy.parts.names import text_name
from leyline_proxy.parts.sealing import PartSeal

OWNER = ("tenant-zebra", "session-walrus")
SECRET = part("the launch code is 7351 and nobody may know it", tool="ls-quokka", turn="t-ibex")
AT_REST = tuple(kind for kind in KINDS if kind != "memory")


def _traces() -> list[bytes]:
    digits = SECRET.address.removeprefix("sha256:")
    words = ["zebra", "walrus", "7351", "quokka", "ibex", digits, digits[:12]]
    return [*map(str.encode, words), bytes.fromhex(digits)]


@pytest.mark.parametrize("kind", AT_REST)
async def test_nothing_is_in_clear(place_of: Callable[[str], Place], kind: str) -> None:
    """Neither texts nor forgets leave a name, an address or a word in what is stored; with no key
    they would."""
    place = place_of(kind)
    clock = Clock(START)
    store = store_over(place.open(), clock)
    await store.put(OWNER, [SECRET])
    stored = place.dump()
    assert len(stored) > len(SECRET.text)
    await store.forget(OWNER, turn="t-ibex", demands=0)
    await store.put(OWNER, [part("other", demands=1)])
    await store.forget(OWNER, turn="", demands=1)
    for trace in _traces():
        assert trace not in stored + place.dump()
    plain = place_of(kind)
    open_store = store_over(plain.open(), clock)
    open_store._seal = PartSeal()
    await open_store.put(OWNER, [SECRET])
    assert b"7351" in plain.dump()
    await store.aclose()
    await open_store.aclose()


async def test_an_entry_opens_only_in_its_place(place: Place) -> None:
    """An entry that is moved to another session, tenant, address or time isn't recalled there."""
    space, clock = place.open(), Clock(START)
    store, seal, other = store_over(space, clock), PartSeal((OLD,)), part("other")
    await store.put(OWNER, [SECRET])
    shelf = seal.shelves(OWNER)[0]
    (name,) = await space.names(shelf)
    entry = (await space.read(shelf, [name]))[name]
    for owner, address, at in (
        (RED, SECRET.address, START),
        ((OWNER[0], "t"), SECRET.address, START),
        (OWNER, other.address, START),
        (OWNER, SECRET.address, START + 50),
    ):
        moved = text_name(seal.tags(owner, address)[0], at)
        await space.write(seal.shelves(owner)[0], {moved: entry}, 100)
        assert address not in (await store.get(owner, [address])).parts
        await space.remove(seal.shelves(owner)[0], [moved])
    assert (await store.get(OWNER, [SECRET.address])).parts
    await store.aclose()


async def test_a_damaged_entry_is_unknown(place: Place) -> None:
    """A truncated or altered entry is nobody's text, and a forget removes it."""
    space, clock = place.open(), Clock(START)
    store, shelf = store_over(space, clock), PartSeal((OLD,)).shelves(RED)[0]
    await store.put(RED, [SECRET])
    (name,) = await space.names(shelf)
    entry = (await space.read(shelf, [name]))[name]
    damaged = [entry[:size] for size in (0, 3, 40, len(entry) // 2, len(entry) - 1)]
    damaged += [
        entry[:at] + bytes([entry[at] ^ 1]) + entry[at + 1 :] for at in (0, 4, 30, len(entry) - 1)
    ]
    for each in damaged:
        await space.write(shelf, {name: each}, 100)
        assert await store.get(RED, [SECRET.address]) == FoundParts()
    assert (await store.held(RED, 1))[1] == 1
    await store.forget(RED, turn="", demands=0)
    assert await store.held(RED, 1) == (0, 0)
    await store.aclose()


@settings(max_examples=40)
@given(st.text(), st.text(), st.text(), st.text())
def test_owners_have_shelves_of_their_own(a: str, b: str, c: str, d: str) -> None:
    """Two owners share a shelf only if they are the same, and each key names it differently."""
    seal = PartSeal((OLD, NEW))
    assert (seal.shelves((a, b)) == seal.shelves((c, d))) == ((a, b) == (c, d))
    first, second = seal.shelves((a, b))
    assert first != second
    assert first == PartSeal((OLD,)).shelves((a, b))[0]


async def test_a_folder_holds_only_hashes(place_of: Callable[[str], Place], tmp_path: Path) -> None:
    """Two sessions of a tenant share a folder of its own, and two tenants share none."""
    seal = PartSeal((OLD,))
    red, blue = seal.shelves(("red", "s"))[0], seal.shelves(("blue", "s"))[0]
    assert red[0] == seal.shelves(("red", "t"))[0][0] != blue[0]
    assert red[1] != blue[1]
