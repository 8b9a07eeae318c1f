"""Keys of cached blocks: vLLM's own hashes, private from the first spliced position on.

vLLM finds a block by a hash that is chained over all tokens up to its end. Under a lineage map, the
key of a block is a hash of that plain hash and of the runs that begin before the block's end::

    tokens   0 ───── exact ─────┬── spliced under run 1 ──┬── under runs 1 and 2 ── n
    block    plain hash         │ H(plain, run 1)         │ H(plain, runs 1 and 2)

So a lineage costs one short hash per block, and no token is hashed twice. A block that contains the
start of a run is private as a whole.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import msgspec

from leyline_engine.contract import LineageRun
from leyline_engine.records.lineage import MAX_TOKEN, framed
from leyline_engine.records.publications import Publication, Space

Hasher = Callable[[Any], list[bytes]]
"""vLLM's function that hashes a request's full blocks from the ``len(block_hashes)``-th on."""


class LineageKeys:
    """Keys under one lineage map.

    Args:
        runs: sorted by start; each governs the positions from its start to the end.
        scope: tenant; a lineage's name means nothing outside of it.
        block: tokens per block.
    """

    def __init__(self, runs: Sequence[LineageRun], scope: str, block: int) -> None:
        state = blake2b(digest_size=32)
        state.update(framed(scope))
        self._firsts: list[int] = []
        self._digests: list[bytes] = []
        for run in runs:
            state.update(framed(run.lineage) + run.start.to_bytes(8, "big"))
            self._firsts.append(run.start // block)
            self._digests.append(state.copy().digest())

    @property
    def first(self) -> int | None:
        """The first private block; None if there is none."""
        return self._firsts[0] if self._firsts else None

    def of(self, number: int, plain: bytes) -> bytes:
        """Return the key of the ``number``-th block, whose plain hash is given."""
        at = bisect_right(self._firsts, number)
        if at == 0:
            return plain
        return blake2b(plain, digest_size=32, key=self._digests[at - 1]).digest()

    def over(self, plain: Sequence[bytes], start: int = 0) -> Iterator[bytes]:
        """Yield the keys of all blocks from the ``start``-th on."""
        for number in range(start, len(plain)):
            yield self.of(number, plain[number])


class RequestKeys:
    """The keys of one vLLM request, in place of its block hasher.

    vLLM appends to ``request.block_hashes`` what the hasher returns whenever tokens are added. The
    plain hashes are kept here, since private keys don't chain.
    """

    def __init__(self, request: Any, block: int) -> None:
        self.plain: list[bytes] = list(request.block_hashes)
        self._block = block
        self._hasher: Hasher | None = request._block_hasher
        self._keys = LineageKeys((), "", block)
        if self._hasher is not None:  # there is none without prefix caching
            request._block_hasher = self

    def __call__(self, request: Any) -> list[bytes]:
        """Hash the request's new full blocks, as vLLM's own hasher does; returns their keys."""
        # vLLM takes the last token of a streamed prompt's part back, and its block's key with it.
        del self.plain[len(request.block_hashes) :]
        known = len(self.plain)
        if self._hasher is None:
            return []
        keys, request.block_hashes = request.block_hashes, self.plain
        try:
            self.plain.extend(self._hasher(request))
        finally:
            request.block_hashes = keys
        return list(self._keys.over(self.plain, known))

    def under(self, runs: Sequence[LineageRun], scope: str) -> Iterator[bytes]:
        """Yield the keys that all blocks have under a lineage map, lazily."""
        return LineageKeys(runs, scope, self._block).over(self.plain)

    def use(self, request: Any, runs: Sequence[LineageRun], scope: str) -> None:
        """File the request's blocks under a lineage map from now on."""
        self._keys = LineageKeys(runs, scope, self._block)
        request.block_hashes[:] = self._keys.over(self.plain)


@dataclass(slots=True)
class _Tokens:
    """The fields of a request that vLLM's block hasher reads."""

    all_token_ids: Sequence[int]
    lora_request: Any
    cache_salt: str | None
    block_hashes: list[bytes] = field(default_factory=list)
    mm_features: list[Any] = field(default_factory=list)
    prompt_embeds: None = None

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


@dataclass(frozen=True, slots=True)
class _Adapter:
    """The fields of a LoRA request that vLLM's block hasher reads."""

    lora_name: str
    lora_path: str

    @classmethod
    def of(cls, key: str) -> _Adapter:
        """Return the adapter of a :class:`Space`."""
        return cls(*msgspec.json.decode(key, type=tuple[str, str]))

    @property
    def key(self) -> str:
        """Its part of a :class:`Space`."""
        return msgspec.json.encode((self.lora_name, self.lora_path)).decode()


class PathHasher:
    """Hashes paths that no request has any more.

    Args:
        hasher: vLLM's block hasher.
        block: tokens per block.
    """

    def __init__(self, hasher: Hasher, block: int) -> None:
        self._hasher = hasher
        self._block = block

    def plain(self, tokens: Sequence[int], space: Space) -> list[bytes]:
        """Return the plain hashes of the full blocks of a token sequence."""
        adapter = None if space.extra_key is None else _Adapter.of(space.extra_key)
        return self._hasher(_Tokens(tokens, adapter, space.cache_salt))

    def keys(self, path: Publication, scope: str) -> list[bytes]:
        """Return the keys of the full blocks of a noted path."""
        tokens = array("q", (key & MAX_TOKEN for key in path.keys))
        plain = self.plain(tokens, path.space)
        return list(LineageKeys(path.runs, scope, self._block).over(plain))


def space_of(request: Any) -> Space:
    """Return the namespace of a vLLM request's keys: its adapter and its salt."""
    adapter = request.lora_request
    if adapter is None:
        return Space(None, request.cache_salt)
    return Space(_Adapter(adapter.lora_name, adapter.lora_path).key, request.cache_salt)
