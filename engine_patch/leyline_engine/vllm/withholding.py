"""KV that requests compute while something that it may have read is forgotten: never found, and
overwritten when they end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from secrets import token_hex
from typing import Any

from leyline_engine.contract import LineageRun
from leyline_engine.records.lineage import runs_before
from leyline_engine.vllm.block_keys import RequestKeys
from leyline_engine.vllm.blocks import BlockCache
from leyline_engine.vllm.turn import Turn


class Withholder:
    """Keeps blocks of running requests from being found.

    Args:
        cache: the blocks.
        blocks_of: returns a request's blocks, in order, by its id.
    """

    def __init__(self, cache: BlockCache, blocks_of: Callable[[str], Sequence[Any]]) -> None:
        self._cache = cache
        self._blocks_of = blocks_of
        self._secret = token_hex(16)
        """Beginning of the lineages of withheld KV: no envelope can name them."""
        self._firsts: dict[str, int] = {}
        """By request, its first withheld block."""

    def turn(self, turn: Turn, position: int, ticket: str) -> None:
        """Withhold the blocks of a turn from the one that has a position on.

        Args:
            ticket: name of the forget that waits for them.
        """
        first = position // self._cache.block
        kept = runs_before(turn.lineage, first * self._cache.block)
        hidden = LineageRun(first * self._cache.block, f"{self._secret} {turn.message_id}")
        turn.keys.use(turn.req, (*kept, hidden), turn.scope)
        turn.withheld = True
        self._withhold(turn.req, first, ticket)

    def stranger(self, request: Any, first: int, ticket: str) -> None:
        """Withhold the blocks of a request without a turn, from its ``first`` one on."""
        keys = request._block_hasher
        if not isinstance(keys, RequestKeys):
            keys = RequestKeys(request, self._cache.block)
        hidden = LineageRun(first * self._cache.block, f"{self._secret} {request.request_id}")
        keys.use(request, (hidden,), "")
        self._withhold(request, first, ticket)

    def _withhold(self, request: Any, first: int, ticket: str) -> None:
        name = str(request.request_id)
        self._firsts[name] = min(first, self._firsts.get(name, first))
        blocks = self._blocks_of(name)[first:]
        self._hide(blocks)
        # One that waits will have its prompt's.
        count = max(len(blocks), len(request.block_hashes) - first)
        self._cache.pending.wait(ticket, name, count * self._cache.block)

    def _hide(self, blocks: Sequence[Any]) -> None:
        for block in blocks:
            self._cache.hide(block, "forgotten")
            self._cache.doom(block)

    def releasing(self, request: Any) -> None:
        """Record that a request is about to give its blocks back: withheld ones are overwritten."""
        name = str(request.request_id)
        if name not in self._firsts:
            return
        blocks = self._blocks_of(name)[self._firsts[name] :]
        self._hide(blocks)
        for ticket in self._cache.pending.tickets(name):
            for block in blocks:
                self._cache.await_block(ticket, block)

    def holds(self, request: Any) -> bool:
        """Return True if vLLM has given a request blocks."""
        return bool(self._blocks_of(str(request.request_id)))

    def ended(self, request: Any) -> None:
        """Record that a request ended; :meth:`releasing` comes first."""
        name = str(request.request_id)
        if self._firsts.pop(name, None) is not None:
            for ticket in self._cache.pending.tickets(name):
                self._cache.pending.wait(ticket, name, 0)  # its blocks are waited for
            self._cache.pending.let_go([name])
