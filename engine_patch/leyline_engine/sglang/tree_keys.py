"""Keys as SGLang's tree takes them, of keys as everybody else here uses them.

A path of n keys has n slots, and the key of a slot carries its lineage. With EAGLE's drafts, the
tree's keys are pairs: the draft model's KV in a slot has read the token after the slot's own, so a
slot is found by both, and a path of n keys has n - 1 slots. SGLang makes the pairs itself. Here, a
slot's lineage moves to the second token of its pair, so that slots are private from the first
spliced one on, as with single keys::

    slots      0       1       2       3
    keys       a       b       c'      d'      e'         ' under a lineage, from slot 2 on
    pairs     (a b)   (b c)   (c d')  (d' e')             c is unmarked: slot 1 stays exact
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np
from sglang.srt.mem_cache.radix_cache import RadixKey

from leyline_engine.admit.plan import page_floor
from leyline_engine.records.keys import shared_length
from leyline_engine.records.lineage import MAX_TOKEN
from leyline_engine.records.publications import Space


@dataclass(frozen=True, slots=True)
class TreeKeys:
    """The keys of one tree.

    Attributes:
        page: tokens per page.
        lookahead: tokens after its own that a slot has read: 1 if keys are pairs, else 0.
    """

    page: int = 1
    lookahead: int = 0

    def key(self, keys: array[int], space: Space, limit: int | None = None) -> RadixKey:
        """Return the tree's key for ``keys[:limit]``."""
        return RadixKey(
            self.shifted(keys), space.extra_key, limit=limit, cache_salt=space.cache_salt
        )

    def shifted(self, keys: array[int]) -> array[int]:
        """Return keys with each slot's lineage where the tree looks for it."""
        if not self.lookahead or not keys:
            return keys
        view = np.frombuffer(keys, dtype=np.int64)
        if view.max() <= MAX_TOKEN:
            return keys
        tokens = view & MAX_TOKEN
        tokens[1:] |= view[:-1] & ~MAX_TOKEN
        return array("q", tokens.tobytes())

    def common(self, keys: array[int], others: array[int]) -> int:
        """Return the number of leading keys by which two paths find the same slots."""
        return shared_length(self.shifted(keys), self.shifted(others))

    def slots_within(self, keys: int) -> int:
        """Return the number of leading slots, in whole pages, that have read only so many keys."""
        return page_floor(max(0, keys - self.lookahead), self.page)

    def keys_of(self, slots: int) -> int:
        """Return the number of leading keys by which so many slots are found."""
        return slots + self.lookahead if slots else 0


def limited(key: RadixKey, limit: int) -> RadixKey:
    """Return a tree's key with at most ``limit`` of its tokens."""
    limit = limit if key.limit is None else min(limit, key.limit)
    return RadixKey(key.token_ids, key.extra_key, key.is_bigram, limit, key.cache_salt)
