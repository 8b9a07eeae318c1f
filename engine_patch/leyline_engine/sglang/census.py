"""The slots of SGLang's KV pool by owner, counted without walking its tree.

SGLang's tree reports how much it holds, not under which keys. So slots that are published after a
splice are marked, in a tensor beside the pool, and the mark is cleared when the tree frees them.
The number of marked slots is one sum over a byte per slot.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from leyline_engine.admit.plan import page_floor
from leyline_engine.occupancy import Cached, PoolLevels


class Tree(Protocol):
    """The counted tree; see :class:`.radix.LeylineRadixCache`."""

    row_allocator: Any
    req_to_token_pool: Any

    def full_evictable_size(self) -> int: ...
    def full_protected_size(self) -> int: ...


def open_census(tree: Any) -> Census:
    """Open a census of the slots that keys find."""
    return Census(tree, tree.row_allocator.device)


class Census:
    """The marked slots of one pool, and the most that were in use.

    Args:
        tree: the tree over the pool.
        device: device of the pool's slot numbers.
    """

    def __init__(self, tree: Tree, device: torch.device | str) -> None:
        self._tree = tree
        self._allocator = tree.row_allocator
        self._state_allocator = getattr(tree.req_to_token_pool, "mamba_allocator", None)
        page = int(self._allocator.page_size)
        self.capacity = page_floor(int(self._allocator.size), page)
        # Slot 0, or the first page, is SGLang's padding.
        self._marks = torch.zeros(self.capacity + page, dtype=torch.uint8, device=device)
        self._any = False
        self._peak = 0

    def published(self, slots: torch.Tensor, exact: int) -> None:
        """Record that the tree took slots.

        Args:
            slots: int64 ``[n]``, in key order.
            exact: number of leading slots under plain keys.
        """
        if exact < len(slots):
            self._marks[slots[max(0, exact) :]] = 1
            self._any = True

    def freeing(self, slots: list[torch.Tensor]) -> None:
        """Record that the tree is about to free slots."""
        self.note_peak()
        if self._any and slots:
            # One write: an eviction frees leaf by leaf.
            self._marks[torch.cat(slots)] = 0

    def cleared(self) -> None:
        """Record that the tree is empty."""
        self._marks.zero_()
        self._any = False

    def note_peak(self) -> None:
        """Note the slots in use while they are most: just before some are freed."""
        self._peak = max(self._peak, self.capacity - self._free())

    def _free(self) -> int:
        return int(self._allocator.available_size())

    def levels(self, claimed: Cached) -> PoolLevels:
        """Return slots by owner.

        If anything is spliced, on a GPU, this waits for the work queued on the scheduler's stream:
        with overlap scheduling up to the end of the forward in flight.

        Args:
            claimed: tokens of the tree that claims hold.
        """
        self.note_peak()
        cached = int(self._tree.full_evictable_size()) + int(self._tree.full_protected_size())
        spliced = int(self._marks.sum()) if self._any else 0
        self._any = bool(spliced)
        states = self._state_allocator
        free_states = int(states.available_size()) if states is not None else 0
        return PoolLevels(
            capacity=self.capacity,
            free=self._free(),
            cached=Cached(cached - spliced, spliced),
            claimed=claimed,
            peak=self._peak,
            states=int(states.size) - free_states if states is not None else 0,
            free_states=free_states,
        )
