"""Whose the slots of a replay engine are, counted one by one, beside what its metrics say."""

from __future__ import annotations

from leyline_engine.claims.runs import pages_of
from leyline_engine.records.lineage import MAX_TOKEN
from leyline_replay.engine import ReplayEngine


def check_levels(engine: ReplayEngine) -> None:
    """Compare the engine's levels with a look at every node and every claimed page."""
    cached: dict[int, bool] = {}
    page, page_of = engine.cache.page_tokens, {}
    for node in engine.cache.tree.nodes():
        for start in range(0, len(node.slots), page):
            page_of[int(node.slots[start])] = node.slots[start : start + page].tolist()
        for key, slot in zip(node.keys, node.slots.tolist(), strict=True):
            cached[slot] = key > MAX_TOKEN
    keeper = engine.claims.keeper
    claimed = {
        slot
        for _, runs in keeper.holds()
        for name in pages_of(runs)
        for slot in page_of[keeper.names._slots[name]]
    }
    stats, levels = engine.stats(), engine.levels()
    assert claimed <= cached.keys()
    assert levels.by_owner() == {
        "exact": sum(not spliced for slot, spliced in cached.items() if slot not in claimed),
        "spliced": sum(spliced for slot, spliced in cached.items() if slot not in claimed),
        "claimed": len(claimed),
        "in_flight": stats.in_flight + stats.doomed,
        "free": stats.free,
    }
    assert sum(levels.by_owner().values()) == levels.capacity
    assert levels.capacity - levels.free <= levels.peak <= levels.capacity
