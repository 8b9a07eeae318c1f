"""An index that catches up in portions, beside one that never waits."""

from __future__ import annotations

import random
from array import array

import numpy as np
import pytest

from leyline_engine.contract import LineageRun, token_digest
from leyline_engine.records.sources import SourceTurn
from leyline_engine.reuse.index import ReuseIndex
from leyline_engine.reuse.winnowing import Winnower

CAPACITY = 1 << 17


def turn(name: str, ids: list[int], lineage: tuple[LineageRun, ...] = ()) -> SourceTurn:
    tokens = array("q", ids)
    return SourceTurn(name, tokens, token_digest(tokens), lineage, "scope", "session")


def entries(index: ReuseIndex) -> set[tuple[int, str, int]]:
    return {(slot, place.source.turn, place.position) for slot, place in index.entries()}


def places(index: ReuseIndex) -> set[str]:
    """Names of the turns that anything is found in now."""
    tenant = index._tenants["scope"]
    values = tuple(tenant._places)
    return {place.source.turn for value in values for place in index.places("scope", value)}


@pytest.mark.parametrize("seed", range(6))
def test_portions_lead_to_the_same_index(seed: int) -> None:
    """Turns that come, part, are freed in part and go leave the same entries in the end."""
    rng = random.Random(seed)
    indexes = ReuseIndex(Winnower(3), CAPACITY), ReuseIndex(Winnower(3), CAPACITY, defers=True)
    kept: list[tuple[SourceTurn, np.ndarray]] = []
    waited = free = 0
    for number in range(12):
        ids = rng.choices(range(5000), k=9000)
        slots = np.arange(free, free + 9000)
        if kept and rng.random() < 0.7:
            old, held = rng.choice(kept)
            at = rng.randrange(len(held))
            ids, slots = [*old.tokens[:at], *ids[at:]], np.concatenate([held[:at], slots[at:]])
        free += 9000
        new = turn(f"t{number}", ids)
        for index in indexes:
            index.add(new, slots)
        kept.append((new, slots))
        freeing = rng.random() < 0.3
        if freeing:
            freed = rng.choice(kept)[1][rng.randrange(1000, 9000) :]
            for index in indexes:
                index.freed(freed)
            kept = [
                (each, held[: int(np.argmax([*np.isin(held, freed), 1]))]) for each, held in kept
            ]
        if len(kept) > 3:
            gone, _ = kept.pop(rng.randrange(3))
            for index in indexes:
                index.drop(gone, [other for other, _ in kept])
            assert gone.turn not in places(indexes[1]), "found after it was dropped"
        waited += indexes[1].work()
        while freeing and indexes[1].work():
            continue  # a turn that continues what was just freed may be indexed in part
    assert waited > 6, "control: nothing had to wait"
    assert entries(indexes[0]) == entries(indexes[1])
    assert len(entries(indexes[0])) > 500


def test_every_fingerprint_is_entered() -> None:
    """A turn's entries are the fingerprints of its tokens, in portions as at once."""
    new = turn("t", random.Random(2).choices(range(5000), k=30_000))
    prints = Winnower(3).select(new.tokens)
    wanted = {(int(at), "t", int(at)) for at in prints.positions}
    for defers in (False, True):
        index = ReuseIndex(Winnower(3), CAPACITY, defers=defers)
        index.add(new, np.arange(30_000))
        assert entries(index) == wanted


def test_a_turn_that_goes_before_it_is_indexed_never_comes() -> None:
    """Nothing that waits of a dropped turn, or tenant, is entered later."""
    index = ReuseIndex(Winnower(3), CAPACITY, defers=True)
    rng = random.Random(1)
    first, second = (turn(name, rng.choices(range(5000), k=9000)) for name in ("t1", "t2"))
    index.add(first, np.arange(9000))
    index.add(second, np.arange(9000, 18000))
    before = len(index)
    assert 0 < before < 400
    index.drop(first)
    assert "t1" not in places(index)
    index.drop_tenant("scope")
    assert not index.work() and len(index) == 0
