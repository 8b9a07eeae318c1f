"""vLLM's block pool as claims see it: blocks that stay, and blocks that are given away last.

vLLM gives away the block at the head of its free queue, cached or not. So ranked blocks that come
into reach are moved to the queue's end, in order of rank, as long as there are others. Within a
priority they keep the queue's own order, which is recency.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Any

from leyline_engine.claims.place import ClaimPlace
from leyline_engine.claims.protection import ClaimKey
from leyline_engine.records.sources import SessionKey, SourceTurn
from leyline_engine.vllm.blocks import BlockCache

Turns = tuple[SessionKey, str]


@dataclass(slots=True, eq=False)
class _Ranked:
    """Blocks of a path that a claim ranks."""

    place: ClaimPlace
    priority: int
    blocks: list[Any]
    cut: bool = False
    """True if one of them was given away. Another block may have the same key, as after a prompt
    that was computed twice; it isn't ranked."""


class BlockShelf:
    """The :class:`leyline_engine.claims.keeper.Shelf` over a block pool.

    Args:
        cache: the blocks.
        keys: returns the keys of a turn's blocks.
    """

    def __init__(self, cache: BlockCache, keys: Callable[[SourceTurn], Iterable[bytes]]) -> None:
        self._cache = cache
        self._keys = keys
        self._known: dict[Turns, tuple[SourceTurn, tuple[bytes, ...]]] = {}
        """Keys of claimed turns' blocks: to hash a long turn again takes milliseconds."""
        self._locked: dict[ClaimKey, tuple[Turns, list[Any]]] = {}
        self._ranked: dict[ClaimKey, _Ranked] = {}
        self._ranks_of: Counter[int] = Counter()
        """The number of claims that rank each block: read whenever a block is given away."""
        self.gave_way: Callable[[Sequence[ClaimKey]], None] = lambda _: None
        """Called with ranked claims of which blocks were given away."""
        self.passed_over: Callable[[Sequence[ClaimKey]], None] = lambda _: None
        """Called with those whose rank has kept blocks from it."""
        cache.watch_gifts(self._make_way, self._given)

    def slots(self, place: ClaimPlace) -> Sequence[int]:
        """Return the slots of a path's cached part."""
        size = self._cache.block
        cut = (each.blocks for each in self._ranked.values() if each.place is place and each.cut)
        blocks = next(cut, None)
        if blocks is None:
            blocks = self._find(place, len(place.keys))
        firsts = (int(block.block_id) * size for block in blocks)
        return [first + offset for first in firsts for offset in range(size)]

    def _find(self, place: ClaimPlace, length: int) -> list[Any]:
        name = _name(place)
        turn, keys = self._known.get(name, (None, ()))
        if turn is not place.turn:
            self._drop_unused()
            keys = tuple(self._keys(place.turn))
            self._known[name] = place.turn, keys
        return self._cache.find(islice(keys, length // self._cache.block))

    def _drop_unused(self) -> None:
        used = {name for name, _ in self._locked.values()}
        used.update(_name(each.place) for each in self._ranked.values())
        self._known = {name: keys for name, keys in self._known.items() if name in used}

    def lock(self, claim: ClaimKey, place: ClaimPlace, length: int) -> None:
        """Hold the blocks of a path."""
        blocks = self._find(place, length)
        self._cache.pin(blocks)
        self._locked[claim] = _name(place), blocks

    def unlock(self, claim: ClaimKey) -> None:
        """Undo a lock, if there is one."""
        _, blocks = self._locked.pop(claim, (None, ()))
        if blocks:
            self._cache.unpin(blocks)

    def rank(self, claim: ClaimKey, place: ClaimPlace, length: int, priority: int) -> None:
        """Have the blocks of a path given away after those of lower priority."""
        blocks = self._find(place, length)
        self._ranked[claim] = _Ranked(place, priority, blocks)
        self._ranks_of.update(int(block.block_id) for block in blocks)

    def unrank(self, claim: ClaimKey) -> None:
        """Undo a rank, if there is one."""
        ranked = self._ranked.pop(claim, None)
        if ranked is not None:
            self._drop_ranks(ranked.blocks)

    def _drop_ranks(self, blocks: Iterable[Any]) -> None:
        for block in blocks:
            number = int(block.block_id)
            self._ranks_of[number] -= 1
            if not self._ranks_of[number]:
                del self._ranks_of[number]

    def free(self) -> int:
        """Return the number of slots in blocks that hold nothing that is cached."""
        return self._cache.count_empty() * self._cache.block

    @property
    def held(self) -> dict[int, int]:
        """The number of claims that hold each block, by its id."""
        found: dict[int, int] = {}
        for _, blocks in self._locked.values():
            for block in blocks:
                found[int(block.block_id)] = found.get(int(block.block_id), 0) + 1
        return found

    # The pool's side.

    def _make_way(self, count: int) -> None:
        """Move ranked blocks among the next ``count`` of the free queue to its end."""
        if not self._ranked:
            return
        if not any(int(block.block_id) in self._ranks_of for block in self._cache.next_free(count)):
            return
        ranks = self._ranks()
        waiting = [(*rank, block) for rank, block in ranks.values() if block.ref_cnt == 0]
        waiting.sort(key=lambda each: each[:3])
        self._cache.give_last([block for *_, block in waiting])
        saved = {int(block.block_id) for *_, block in waiting}
        saved.difference_update(int(block.block_id) for block in self._cache.next_free(count))
        self.passed_over(
            [key for key, numbers in self._by_claim() if not saved.isdisjoint(numbers)]
        )

    def _ranks(self) -> dict[int, tuple[tuple[int, int, int], Any]]:
        """Return the blocks that a priority holds back, by id: (priority, recency, minus depth),
        block.

        The end of a path goes before its beginning, which others may share: a block is as recent as
        all that continues it.
        """
        free = self._cache.next_free(self._cache.free)
        recency = {int(block.block_id): at for at, block in enumerate(free)}
        found: dict[int, tuple[tuple[int, int, int], Any]] = {}
        for ranked in self._ranked.values():
            latest = 0
            for depth, block in reversed([*enumerate(ranked.blocks if ranked.priority else ())]):
                number = int(block.block_id)
                latest = max(latest, recency.get(number, 0))
                rank = ranked.priority, latest, -depth
                if number not in found or found[number][0] < rank:
                    found[number] = rank, block
        return found

    def _by_claim(self) -> Iterator[tuple[ClaimKey, set[int]]]:
        for key, ranked in self._ranked.items():
            if ranked.priority:
                yield key, {int(block.block_id) for block in ranked.blocks}

    def _given(self, blocks: Iterable[int]) -> None:
        """Notify the claims that rank blocks which the pool gave away."""
        gone, hit = self._ranks_of.keys() & set(blocks), []
        for key, ranked in self._ranked.items() if gone else ():
            left = list(takewhile(lambda block: int(block.block_id) not in gone, ranked.blocks))
            if len(left) < len(ranked.blocks):
                # What comes after a missing block can't be found.
                self._drop_ranks(ranked.blocks[len(left) :])
                ranked.blocks, ranked.cut = left, True
                hit.append(key)
        if hit:
            self.gave_way(hit)


def _name(place: ClaimPlace) -> Turns:
    return place.session, place.turn.turn
