"""The order in which vLLM's own block pool gives blocks away, beside a list that is sorted."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

from leyline_engine.claims.place import ClaimPlace
from leyline_engine.contract import token_array
from leyline_engine.records.sources import SourceTurn
from leyline_engine.vllm.blocks import BlockCache
from leyline_engine.vllm.claim_shelf import BlockShelf

SIZE, BLOCKS = 4, 16
TEXTS = {name: [ord(each) for each in name] for name in ("aaaa", "aabb", "aabc", "dddd", "dd")}
"""Paths by name, a letter per block; some share their beginning."""
Path = tuple[int, ...]


@dataclass
class Naive:
    """Paths that are cached, least recently used first, and the ranks of claims."""

    cached: list[Path] = field(default_factory=list)
    ranks: dict[str, tuple[list[Path], int]] = field(default_factory=dict)

    def use(self, path: Path) -> None:
        """Use a path: what it begins with is more recent than what follows."""
        for end in range(len(path), 0, -1):
            if path[:end] in self.cached:
                self.cached.remove(path[:end])
            self.cached.append(path[:end])

    def rank(self, path: Path) -> int:
        """The highest priority of a path's last block."""
        return max((p for held, p in self.ranks.values() if path in held), default=0)

    def recency(self, path: Path) -> int:
        """The place of the most recent block that continues a ranked path, in its own rank."""
        peers = (held for held, p in self.ranks.values() if p == self.rank(path) and path in held)
        after = (each for held in peers for each in held if len(each) >= len(path))
        return max(self.cached.index(each) for each in after if each in self.cached)

    def take(self, blocks: int) -> set[Path]:
        """Take so many cached paths; ranked ones in reach become the most recent first."""
        if any(self.rank(path) for path in self.cached[:blocks]):
            plain = [path for path in self.cached if not self.rank(path)]
            ranked = [path for path in self.cached if self.rank(path)]
            ranked.sort(key=lambda path: (self.rank(path), self.recency(path), -len(path)))
            self.cached = [*plain, *ranked]
        gone, self.cached = self.cached[:blocks], self.cached[blocks:]
        return set(gone)

    def lose(self, gone: set[Path]) -> set[str]:
        """Take paths from claims; returns those that had any."""
        lost = {name for name, (held, _) in self.ranks.items() if gone.intersection(held)}
        for name in lost:
            held, priority = self.ranks[name]
            first = min(len(path) for path in gone.intersection(held))
            self.ranks[name] = held[: first - 1], priority
        return lost


class Shelves(RuleBasedStateMachine):
    """A block pool whose blocks are used, ranked and given away."""

    def __init__(self) -> None:
        super().__init__()
        from vllm.v1.core.block_pool import BlockPool
        from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

        self.pool = BlockPool(BLOCKS + 1, True, SIZE)
        self.file = make_block_hash_with_group_id
        self.cache = BlockCache(self.pool, SIZE, self.file)
        self.shelf = BlockShelf(self.cache, lambda turn: self.keys(turn.turn))
        self.hit: list[str] = []
        self.shelf.gave_way = lambda keys: self.hit.extend(name for _, name in keys)
        self.naive = Naive()

    def keys(self, name: str) -> list[bytes]:
        path = tuple(TEXTS[name])
        return [self.key(path[: end + 1]) for end in range(len(path))]

    def key(self, path: Path) -> bytes:
        return bytes(path)

    def given(self, blocks: int, used: int = 0) -> None:
        """Check who learns of a loss.

        Args:
            blocks: the number that the pool gave away.
            used: cached blocks that a request holds meanwhile.
        """
        empty = BLOCKS - used - len(self.naive.cached)
        assert set(self.hit) == self.naive.lose(self.naive.take(max(0, blocks - empty)))
        self.hit.clear()

    @rule(name=st.sampled_from(sorted(TEXTS)))
    def use(self, name: str) -> None:
        """A request computes a text, or finds it, and ends."""
        path = tuple(TEXTS[name])
        found = self.cache.find(self.keys(name))
        self.pool.touch(found)
        for end in range(1, len(found) + 1):
            self.naive.cached.remove(path[:end])
        missing = len(path) - len(found)
        blocks = self.pool.get_new_blocks(missing) if missing else []
        self.given(missing, len(found))
        for end, block in enumerate(blocks, len(found) + 1):
            self.pool._insert_block_hash(self.file(self.key(path[:end]), 0), block, SIZE)
        self.pool.free_blocks(reversed([*found, *blocks]))
        self.naive.use(path)

    @rule(name=st.sampled_from(sorted(TEXTS)), priority=st.integers(0, 3), blocks=st.integers(1, 4))
    def rank(self, name: str, priority: int, blocks: int) -> None:
        """A claim ranks the beginning of a text; another one of its name goes."""
        self.unrank(name)
        turn = SourceTurn(name, token_array([0] * SIZE * len(TEXTS[name])), "", (), "t", "s")
        length = min(blocks, len(TEXTS[name])) * SIZE
        place = ClaimPlace(turn.tokens[:length], 0, length, 0, turn)
        self.shelf.rank(("t", name), place, length, priority)
        path = tuple(TEXTS[name])[: length // SIZE]
        ends = [path[: end + 1] for end in range(len(path))]
        held = [each for each in ends if each in self.naive.cached]
        self.naive.ranks[name] = held, priority

    @rule(name=st.sampled_from(sorted(TEXTS)))
    def unrank(self, name: str) -> None:
        """The claim ends."""
        self.shelf.unrank(("t", name))
        self.naive.ranks.pop(name, None)

    @rule(blocks=st.integers(1, BLOCKS))
    def take(self, blocks: int) -> None:
        """A request takes blocks and leaves nothing that is found."""
        self.pool.free_blocks(self.pool.get_new_blocks(blocks))
        self.given(blocks)

    @invariant()
    def agrees(self) -> None:
        """The cache has what the list has."""
        for path in map(tuple, TEXTS.values()):
            ends = [path[: end + 1] for end in range(len(path))]
            known = [self.cache.find([self.key(each)]) != [] for each in ends]
            assert known == [each in self.naive.cached for each in ends]


def test_blocks_go_by_rank_recency_and_depth() -> None:
    """Unranked blocks go first, least recently used first; ranked ones by priority, by the recency
    of what continues them, and from a path's end; claims learn of each loss, and of no other."""
    few = settings(max_examples=150, stateful_step_count=25)
    run_state_machine_as_test(Shelves, settings=few)
