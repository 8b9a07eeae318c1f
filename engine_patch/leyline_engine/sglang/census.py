"""Whose the slots of SGLang's KV pool are, without walking its tree.

SGLang's tree says how much it holds, not under which keys. So slots that are published behind a
splice are marked, in a tensor beside the pool, and the mark goes when the tree frees them. How many
are marked is one sum over a byte per slot.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from leyline_engine.occupancy import Cached, PoolLevels


class Tree(Protocol):
    """What is counted; see :class:`.radix.LeylineRadixCache`."""

    token_to_kv_pool_allocator: Any

    def evictable_size(self) -> int: ...
    def protected_size(self) -> int: ...


def open_census(tree: Any) -> Census | None:
    """A census, where each slot holds all of one token; not of windowed or recurrent models."""
    if tree.supports_swa() or tree.supports_mamba():
        return None
    return Census(tree, tree.token_to_kv_pool_allocator.device)


class Census:
    """The slots of one pool that are marked, and the most that were in use.

    Args:
        tree: over the pool.
        device: of the pool's slot numbers.
    """

    def __init__(self, tree: Tree, device: torch.device | str) -> None:
        self._tree = tree
        self._allocator = tree.token_to_kv_pool_allocator
        self.capacity = int(self._allocator.size)
        # Slot 0, or the first page, is SGLang's padding.
        count = self.capacity + int(self._allocator.page_size)
        self._marks = torch.zeros(count, dtype=torch.uint8, device=device)
        self._any = False
        self._peak = 0

    def published(self, slots: torch.Tensor, exact: int) -> None:
        """The tree took slots.

        Args:
            slots: int64 ``[n]``, in key order.
            exact: how many of them, from the first on, are under plain keys.
        """
        if exact < len(slots):
            self._marks[slots[max(0, exact) :]] = 1
            self._any = True

    def freeing(self, slots: list[torch.Tensor]) -> None:
        """The tree is about to free slots."""
        self.note_peak()
        if self._any and slots:
            # One write: an eviction frees leaf by leaf.
            self._marks[torch.cat(slots)] = 0

    def cleared(self) -> None:
        """The tree is empty."""
        self._marks.zero_()
        self._any = False

    def note_peak(self) -> None:
        """Called where the slots in use are as many as they get: just before some are freed."""
        self._peak = max(self._peak, self.capacity - self._free())

    def _free(self) -> int:
        return int(self._allocator.available_size())

    def levels(self, claimed: Cached) -> PoolLevels:
        """Slots by owner.

        Where anything is spliced, on a GPU, this waits for what the scheduler's stream has queued:
        with overlap scheduling up to the end of the forward in flight.

        Args:
            claimed: what claims hold in the tree.
        """
        self.note_peak()
        cached = int(self._tree.evictable_size()) + int(self._tree.protected_size())
        spliced = int(self._marks.sum()) if self._any else 0
        self._any = bool(spliced)
        return PoolLevels(
            capacity=self.capacity,
            free=self._free(),
            cached=Cached(cached - spliced, spliced),
            claimed=claimed,
            peak=self._peak,
        )
