"""Whose the slots of a scheduler's pool are, counted one by one, beside what the metrics say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from leyline_engine.claims.runs import pages_of
from leyline_engine.contract import ForgetCounts
from leyline_engine.metrics import NoMetrics
from leyline_engine.occupancy import PoolLevels, RegistryLevels
from leyline_engine.records.lineage import MAX_TOKEN, first_spliced


class Seen(NoMetrics):
    """Metrics that keep the last values reported."""

    def __init__(self) -> None:
        self.levels: PoolLevels | None = None
        self.remembered = RegistryLevels()
        self.copied_bytes = self.evicted_tokens = self.refusals = self.overwritten = 0
        self.retired_tokens = 0

    @property
    def collects(self) -> bool:
        """Always."""
        return True

    def pool(self, levels: PoolLevels) -> None:
        self.levels = levels

    def registries(self, levels: RegistryLevels) -> None:
        self.remembered = levels

    def copied(self, size: int) -> None:
        self.copied_bytes += size

    def forgot(self, before: ForgetCounts, now: ForgetCounts) -> None:
        self.overwritten += now.overwritten - before.overwritten

    def evicted(self, tokens: int) -> None:
        self.evicted_tokens += tokens

    def retired(self, tokens: int) -> None:
        self.retired_tokens += tokens

    def refused(self) -> None:
        self.refusals += 1


def check_census(scheduler: Any, seen: Seen, private: int) -> None:
    """Compare what the metrics say with a look at every slot.

    Args:
        private: slots that running requests have outside of the tree.
    """
    scheduler.engine.readings.read()
    cached = set(scheduler.cache.all_values_flatten().tolist())
    spliced = set(_spliced_slots(scheduler))
    claimed = set(_claimed_slots(scheduler.engine.claims.keeper))
    assert spliced <= cached
    assert claimed <= cached
    assert seen.levels is not None
    assert seen.levels.by_owner() == {
        "exact": len(cached - spliced - claimed),
        "spliced": len(spliced - claimed),
        "claimed": len(claimed),
        "in_flight": private,
        "free": scheduler.cache.row_allocator.available_size(),
    }
    assert scheduler.capacity - scheduler.cache.row_allocator.available_size() <= seen.levels.peak
    assert seen.levels.peak <= scheduler.capacity == sum(seen.levels.by_owner().values())


def _spliced_slots(scheduler: Any) -> Iterator[int]:
    """Slots under keys that a lineage is folded into."""
    core = scheduler.cache.tree_core
    if "root_node" in vars(core):
        stack = list(core.root_node.children.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            if node.evicted:
                continue
            keys = node.key.raw_token_ids()[scheduler.cache.tree_keys.lookahead :]
            slots = core.collect_full_device_indices(node.id, node.parent.id).tolist()
            yield from (slot for slot, key in zip(slots, keys, strict=True) if key > MAX_TOKEN)
        return
    # The Rust core shows no keys: what lies on the paths that sessions are known to have published,
    # and on those that only wait to be removed.
    published = [path for _, path in scheduler.engine.publications.all()]
    for path in (*published, *(doomed.path for doomed in scheduler.cache.condemned)):
        slots = scheduler.cache.slots_of(path).tolist()
        yield from slots[first_spliced(path.runs, len(slots)) :]


def _claimed_slots(keeper: Any) -> Iterator[int]:
    for _, runs in keeper.holds():
        for page in pages_of(runs):
            first = keeper.names._slots[page]
            yield from range(first, first + keeper.book.arithmetic.page_size)
