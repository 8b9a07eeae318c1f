"""Evicted texts as turns use them: forgets that a store owes, and places of proofs."""

from __future__ import annotations

import asyncio

import pytest
from parts_kit import BLUE, OLD, RED, START, Broken, part, store_over
from support.clock import Clock
from support.waiting import until

from leyline_engine.contract import ProofPlace
from leyline_proxy.model.parts import FoundParts
from leyline_proxy.parts import marks, recallable_parts
from leyline_proxy.parts.limits import PartStoreError
from leyline_proxy.parts.memory import MemorySpace
from leyline_proxy.parts.recallable_parts import RecallableParts
from leyline_proxy.parts.sealing import PartSeal
from leyline_proxy.turns.memories import KeptTexts

A, B = part("first"), part("second")


def opened() -> tuple[RecallableParts, Broken]:
    """Texts over a space that can be broken."""
    space = Broken(MemorySpace(1 << 20))
    return RecallableParts(store_over(space, Clock(START)), retry_s=0.01), space


async def test_a_forget_that_the_store_cant_take_hides_its_session() -> None:
    """Until an owed forget is paid, nothing of its session is recalled, listed, stored or vouched
    for; other sessions go on, and afterwards it is as if nothing had been wrong."""
    parts, space = opened()
    await parts.put(RED, [A])
    await parts.put(BLUE, [A])
    space.left = 0
    await parts.forget(*RED, "t-f", 0)
    # It comes back, but not for the forget.
    store, forget = parts._store, parts._store.forget

    async def refuses(owner: tuple[str, str], **_: object) -> int:
        raise PartStoreError("still broken")

    space.left = None
    store.forget = refuses  # type: ignore[method-assign,assignment]
    assert parts.owed == 1
    for asked in (parts.get(RED, [A.address], demands=0), parts.listed(RED, demands=0)):
        with pytest.raises(PartStoreError):
            await asked
    with pytest.raises(PartStoreError):
        await parts.put(RED, [B])
    assert await parts.left(*RED, 1) == (ProofPlace(place="parts", unscanned="still broken"),)
    assert (await parts.get(BLUE, [A.address], demands=0)).parts
    store.forget = forget  # type: ignore[method-assign]
    own = part("own", turn="t-f", forgets=True)
    await parts.put(RED, [B, own])
    assert parts.owed == 0
    found = await parts.get(RED, [A.address, B.address, own.address], demands=1)
    assert (set(found.parts), found.forgotten) == ({own.address}, {A.address})


async def test_a_session_whose_forget_is_lost_recalls_nothing_more() -> None:
    """If the store never heard of a session's forget, or lost it, nobody knows what was forgotten:
    nothing comes back, not even after the next forget, and other sessions go on."""
    parts, space = opened()
    await parts.put(RED, [A])
    await parts.put(BLUE, [A])
    space.left = 0
    await parts.forget(*RED, "", 0)
    space.left = None
    again = RecallableParts(parts._store)
    later = part("later", demands=1)
    await again.put(RED, [later])
    wanted = [A.address, later.address]
    assert (await again.get(RED, wanted, demands=0)).parts.keys() == {*wanted}  # the control
    assert await again.get(RED, wanted, demands=1) == FoundParts({}, frozenset(wanted))
    assert not await again.listed(RED, demands=1)
    assert (await again.barred(RED, demands=1)).everything
    await again.forget(*RED, "", 1)
    await again.put(RED, [part("later", demands=2)])
    assert not (await again.get(RED, wanted, demands=2)).parts
    assert (await again.get(BLUE, wanted, demands=0)).parts.keys() == {A.address}


async def test_what_is_barred_stays_out_whoever_puts_it() -> None:
    """A barred text is refused under each part that has it; others come back."""
    parts, _ = opened()
    await parts.put(RED, [A, B])
    await parts.bar(RED, ["first"], demands=0)
    again, run = part(A.text, demands=5), part("a run", sources=(A.address,))
    await parts.put(RED, [again, run, B])
    found = await parts.get(RED, [A.address, B.address, run.address], demands=0)
    assert (found.parts.keys(), found.forgotten) == ({B.address}, {A.address})
    assert (await parts.barred(RED, demands=0)).addresses == {A.address}


async def test_beyond_the_bound_of_forgotten_texts_all_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A session that has forgotten more texts than it can remember recalls nothing more; with as
    many as it can, it does; owed or paid, and for that session alone."""
    for module in (recallable_parts, marks):
        monkeypatch.setattr(module, "MAX_FORGOTTEN", 3)
    for down in (False, True):
        parts, space = opened()
        await parts.bar(RED, "abc", demands=0)
        await parts.put(RED, [B])
        assert (await parts.get(RED, [B.address], demands=0)).parts  # the control
        space.left = 0 if down else None
        for letter in "cd":
            await parts.bar(RED, [letter], demands=0)
        space.left = None
        await parts.put(RED, [B, part("new", demands=9)])
        await parts.put(BLUE, [B])
        assert not await parts.listed(RED, demands=0)
        found = await parts.get(RED, [B.address], demands=0)
        assert (found.parts, found.forgotten) == ({}, {B.address})
        assert await parts.listed(BLUE, demands=0)


async def test_owed_forgets_are_paid_without_being_asked() -> None:
    """A running proxy pays forgets and deletions as soon as the store is back."""
    parts, space = opened()
    await parts.put(RED, [A])
    await parts.put(BLUE, [A])
    space.left = 0
    await parts.forget(*RED, "", 0)
    await parts.delete(*BLUE)
    running = asyncio.create_task(parts.run())
    await asyncio.sleep(0.05)
    assert parts.owed == 2
    space.left = None
    await until(lambda: not parts.owed)
    running.cancel()
    assert (await parts.get(RED, [A.address], demands=0)).forgotten
    assert not (await parts.get(BLUE, [A.address], demands=0)).forgotten


async def test_debts_are_bounded_by_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenant with too many debts loses its own oldest, and no other's."""
    monkeypatch.setattr(recallable_parts, "MAX_OWED", 3)
    parts, space = opened()
    space.left = 0
    await parts.forget(*BLUE, "", 0)
    for number in range(6):
        await parts.forget("red", f"s{number}", "", 0)
    assert set(parts._owed) == {BLUE, ("red", "s3"), ("red", "s4"), ("red", "s5")}


async def test_a_proof_finds_a_planted_survivor() -> None:
    """A text that is in the store after a forget, however it came there, is a survivor in proofs;
    one that was put again by a later turn is none."""
    parts, space = opened()
    kept = KeptTexts(parts)
    await parts.put(RED, [A])
    await parts.put(("red", "t"), [B])
    await kept.forget(*RED, "", 0)
    assert await kept.left(*RED, 1) == [ProofPlace(place="parts", scanned=1)]
    await parts.put(RED, [part("again", demands=1)])
    assert await kept.left(*RED, 1) == [ProofPlace(place="parts", scanned=2)]
    seal = PartSeal((OLD,))
    name = f"p{seal.tags(RED, A.address)[0]}{round(START * 1000):012x}"
    await space.write(seal.shelves(RED)[0], {name: seal.close_part(RED, name, A)}, 100)
    assert await kept.left(*RED, 1) == [ProofPlace(place="parts", scanned=3, survivors=1)]
    assert not (await parts.get(RED, [A.address], demands=1)).parts


async def test_memory_is_bounded_and_fair() -> None:
    """Over the bound of all memory, the tenant with the most loses its oldest, not the others."""
    clock, space = Clock(START), MemorySpace(20_000)
    store = store_over(space, clock)
    await store.put(BLUE, [part("b" * 3000)])
    for number in range(12):
        clock.now += 1
        await store.put(RED, [part(str(number) * 3000)])
    assert (await store.get(BLUE, [part("b" * 3000).address])).parts
    left = await store.listed(RED)
    assert {each.address for each in left} == {
        part(str(number) * 3000).address for number in range(12 - len(left), 12)
    }
    assert 3 <= len(left) <= 5
    assert store.usage.entries == len(left) + 1
    assert 15_000 < store.usage.bytes <= 20_000
    await store.delete(RED)
    await store.delete(BLUE)
    clock.now += 10**6
    await store.tidy()
    assert (store.usage.entries, store.usage.bytes) == (0, 0)
    assert not space._shelves and not space._tenants and not space._bytes


async def test_several_places_are_one() -> None:
    """A forget goes to each place, and what is left is looked for in each."""
    first, second = opened()[0], opened()[0]
    both = KeptTexts(first, second)
    for each in (first, second):
        await each.put(RED, [A])
    assert [place.survivors for place in await both.left(*RED, 1)] == [1, 1]
    await both.forget(*RED, "", 0)
    assert [place.survivors for place in await both.left(*RED, 1)] == [0, 0]
    assert await KeptTexts().left(*RED, 1) == []
