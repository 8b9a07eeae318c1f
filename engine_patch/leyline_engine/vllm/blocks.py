"""vLLM's block pool as a cache of paths: which blocks are found, held, removed and overwritten.

A removed block isn't found any more, whoever holds it. It is overwritten once nobody does, before
its next owner's first forward: the pool reports each block that it takes back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any

from leyline_engine.records.pending import PendingForgets
from leyline_engine.scheduler.containment import contained

GROUP = 0
"""The one KV cache group of the models that are spliced."""
UNPUBLISHED = "unpublished"
"""The cause of a removal that nobody asked for: no rows are there, or no forget would find them."""


class BlockCache:
    """The blocks of one pool.

    Args:
        pool: vLLM's ``BlockPool``.
        block: tokens per block.
        full_key: returns the name under which the pool files a key of a group.
        evicted: called with the ids of cached blocks that are about to be given to others.
    """

    def __init__(
        self,
        pool: Any,
        block: int,
        full_key: Callable[[bytes, int], bytes],
        *,
        evicted: Callable[[Sequence[int]], None] = lambda _: None,
    ) -> None:
        self.block = block
        self.pending = PendingForgets()
        self.hiding: Callable[[Sequence[Any], str], None] = lambda _, __: None
        """Called with blocks that are about to be removed from what is found, and the cause."""
        self._pool = pool
        self._full_key = full_key
        self._evicted = evicted
        self._removing = False
        """True while a block is removed, which is no eviction."""
        self._doomed: set[int] = set()
        """Blocks in use that are overwritten when they are given back."""
        self._stale: dict[int, None] = {}
        """Free blocks that hold rows and can't be found, such as an ended request's last one."""
        self._due: dict[int, None] = {}
        """Blocks to be overwritten in front of the next forward."""
        self._leaving: dict[int, Any] = {}
        """Blocks without a key of ended requests, until vLLM takes them back."""
        self._filed: set[int] = set()
        """Blocks that were filed since the present step began: the pool knows them before any
        forward has written their rows."""
        self._filed_before: set[int] = set()
        """The same of the step before: with async scheduling, its end isn't known yet."""
        self._scrubs = False
        self._watch()

    def _watch(self) -> None:
        """Have the pool report blocks that it files or takes back, and cached ones that it gives
        away."""
        free, evict = self._pool.free_blocks, self._pool._maybe_evict_cached_block
        insert = self._pool._insert_block_hash

        def free_blocks(ordered_blocks: Iterable[Any]) -> None:
            blocks = list(ordered_blocks)
            free(blocks)
            self._released(blocks)

        def maybe_evict(block: Any) -> bool:
            if block.block_hash is not None and not self._removing:
                self._evicted((int(block.block_id),))
            return bool(evict(block))

        def insert_block_hash(key: bytes, block: Any, *args: Any, **options: Any) -> None:
            self._filed.add(int(block.block_id))
            insert(key, block, *args, **options)

        self._pool.free_blocks = free_blocks
        self._pool._insert_block_hash = insert_block_hash
        self._pool._maybe_evict_cached_block = maybe_evict

    def watch_gifts(
        self, giving: Callable[[int], None], given: Callable[[Sequence[int]], None]
    ) -> None:
        """Watch the pool give blocks away.

        Args:
            giving: called with the number of blocks that come next.
            given: called with their ids, once the pool has removed what they held.
        """
        take = self._pool.get_new_blocks

        def get_new_blocks(num_blocks: int, *args: Any, **options: Any) -> list[Any]:
            with contained("choosing the blocks that go last"):
                giving(num_blocks)
            blocks: list[Any] = take(num_blocks, *args, **options)
            with contained("noting the blocks that went"):
                given([int(block.block_id) for block in blocks])
            return blocks

        self._pool.get_new_blocks = get_new_blocks

    def next_free(self, count: int) -> list[Any]:
        """Return the blocks that the pool gives away next."""
        return list(islice(self._pool.free_block_queue.iter_blocks_after(None), count))

    def give_last(self, blocks: Sequence[Any]) -> None:
        """Have the pool give away these free blocks after all others, in order."""
        for block in blocks:
            self._pool.free_block_queue.remove(block)
        self._pool.free_block_queue.append_n(list(blocks))

    def count_empty(self) -> int:
        """Return the number of free blocks that can't be found."""
        free = self._pool.free_block_queue.iter_blocks_after(None)
        return sum(block.block_hash is None for block in free)

    def _released(self, blocks: Sequence[Any]) -> None:
        for block in blocks:
            if block.ref_cnt > 0 or block.is_null:
                continue
            number = int(block.block_id)
            self._leaving.pop(number, None)
            if number in self._doomed:
                self._doomed.discard(number)
                self._due[number] = None
                self.pending.let_go([number])
            elif block.block_hash is None:
                self._stale[number] = None

    # What is found.

    @property
    def free(self) -> int:
        """Number of blocks that are free or can be evicted."""
        return int(self._pool.get_num_free_blocks())

    @property
    def capacity(self) -> int:
        """Number of tokens that the pool holds."""
        return (int(self._pool.num_gpu_blocks) - 1) * self.block

    def find(self, keys: Iterable[bytes], limit: int | None = None) -> list[Any]:
        """Return the cached blocks of a path's beginning.

        Args:
            keys: keys of its blocks; taken one by one until one isn't found.
            limit: the most blocks to return.
        """
        found: list[Any] = []
        for key in keys:
            if limit is not None and len(found) >= limit:
                break
            blocks = self._pool.get_cached_block(key, [GROUP])
            if blocks is None:
                break
            found.append(blocks[0])
        return found

    def written(self, blocks: Sequence[Any]) -> list[Any]:
        """Return the leading blocks that have rows in front of the present step's forward."""
        filed = (at for at, block in enumerate(blocks) if int(block.block_id) in self._filed)
        return list(blocks[: next(filed, len(blocks))])

    def pin(self, blocks: Sequence[Any]) -> None:
        """Hold blocks: they are neither evicted nor given to others."""
        self._pool.touch(blocks)

    def unpin(self, blocks: Sequence[Any]) -> None:
        """Undo one :meth:`pin`."""
        self._pool.free_blocks(reversed(blocks))

    def idle(self, blocks: Sequence[Any]) -> int:
        """Return how many of these blocks nobody holds: a pin takes them out of the free ones."""
        return sum(block.ref_cnt == 0 for block in blocks)

    # What is removed.

    def remove(self, keys: Iterable[bytes], cause: str) -> list[Any]:
        """Remove all blocks under these keys, so that nobody finds them; returns the blocks.

        Args:
            cause: the cause that claims on them report.
        """
        removed: list[Any] = []
        names = list(keys)
        # One loss to the claims on a path, not one of each block.
        found = [block for key in names if (block := self._one(key)) is not None]
        self._tell_hiding(found, cause)
        for key in names:
            while (block := self._one(key)) is not None:
                self.hide(block, cause)
                removed.append(block)
        return removed

    def _one(self, key: bytes) -> Any:
        return self._pool.cached_block_hash_to_block.get_one_block(self._full_key(key, GROUP))

    def hide(self, block: Any, cause: str) -> None:
        """Remove one block from what is found; see :meth:`remove`."""
        if block.block_hash is not None:
            self._tell_hiding([block], cause)
            self._removing = True
            try:
                self._pool.evict_blocks({int(block.block_id)})
            finally:
                self._removing = False

    def _tell_hiding(self, blocks: Sequence[Any], cause: str) -> None:
        with contained("ending claims"):
            self.hiding(blocks, cause)

    def begin_step(self) -> None:
        """Record that vLLM begins to put a step together."""
        self._filed_before, self._filed = self._filed, set()

    def hide_recent(self) -> None:
        """Remove what was filed for steps that may have computed on rows that aren't there."""
        for number in self._filed | self._filed_before:
            self.hide(self._pool.blocks[number], UNPUBLISHED)

    def leaving(self, blocks: Iterable[Any]) -> None:
        """Record that a request is about to give blocks back, maybe a step later."""
        self._leaving |= {int(each.block_id): each for each in blocks if each.block_hash is None}

    def retire(self, block: Any) -> None:
        """Give back a removed block that nobody holds, in front of all that is still cached."""
        if block.ref_cnt == 0:
            self._pool.free_block_queue.remove(block)
            self._pool.free_block_queue.prepend_n([block])
            self._stale[int(block.block_id)] = None

    def doom(self, block: Any) -> bool:
        """Have a removed block overwritten: at once, or when its holders give it back.

        Returns:
            False if somebody holds it.
        """
        number = int(block.block_id)
        self._stale.pop(number, None)
        if block.ref_cnt == 0:
            self._due[number] = None
            return True
        self._doomed.add(number)
        return False

    def await_block(self, ticket: str, block: Any) -> None:
        """Let a forget wait for a doomed block."""
        self.pending.wait(ticket, int(block.block_id), self.block)

    def scrub(self, ticket: str) -> None:
        """Have all rows overwritten that can't be found, and that no request will read."""
        for number in self._stale:
            block = self._pool.blocks[number]
            if block.ref_cnt == 0 and block.block_hash is None:
                self._due[number] = None
        self._stale.clear()
        for block in self._leaving.values():
            self.doom(block)
            self.await_block(ticket, block)
        self._scrubs = True

    def take_scrub(self) -> bool:
        """Return True if :meth:`scrub` was called since the last step: blocks in use may have old
        rows, too, after the last one that their request has written."""
        scrubs, self._scrubs = self._scrubs, False
        return scrubs

    @property
    def has_due(self) -> bool:
        """True if blocks wait for the next step to be overwritten."""
        return bool(self._due)

    def take_due(self) -> list[int]:
        """Return the ids of blocks that the workers must overwrite now, in front of all else."""
        due, self._due = list(self._due), {}
        self.pending.settle()
        return due

    def clear(self) -> None:
        """Record that nothing is cached any more."""
        self.pending.let_go(self._doomed)
        self._due.update(dict.fromkeys(self._doomed))
        self._doomed.clear()
        # Their rows are still there, and no key finds them any more.
        self._stale.update((int(each.block_id), None) for each in self._pool.blocks[1:])
