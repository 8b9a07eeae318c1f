"""KV events of spliced blocks, as a prefix-aware router may read them.

A router keeps an index of the blocks that each engine has announced, and sends a prompt where its
beginning is. Spliced KV belongs to one conversation, so nobody else's prompt may match it there.
SGLang announces the tree's keys, into which lineages are folded: 63-bit numbers. Routers read token
ids of 32 bits, and one larger number may cost them a whole batch of events. So a folded key is
announced as a private id: a number of 30 bits and a flag, which no token of a prompt has and which
differs by lineage. The block's hash is over the folded keys, as in the tree.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from sglang.srt.disaggregation.kv_events import BlockStored

from leyline_engine.contract import PRIVATE_ID
from leyline_engine.records.lineage import MAX_TOKEN, TOKEN_BITS

_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


class LineageStored(BlockStored, tag="BlockStored"):  # type: ignore[call-arg]
    """SGLang's event with one more member; readers that don't know it ignore it."""

    lineage: str | None = None
    """Mark of the lineage of the last token; it means nothing outside of this engine's run.
    None for a block that anybody may find."""


class AnnouncesLineages:
    """A tree whose events show routers whose the blocks are; a base of SGLang's tree."""

    def take_events(self) -> list[Any]:
        """Return what has changed since the last call, for the publisher."""
        taken: list[Any] = super().take_events()  # type: ignore[misc]
        return announced(taken)


def announced(events: Iterable[Any]) -> list[Any]:
    """Return events as routers get them: blocks with folded keys under private ids."""
    return [_announced(event) if isinstance(event, BlockStored) else event for event in events]


def _announced(event: BlockStored) -> BlockStored:
    keys = _flat(event.token_ids)
    last = max(keys, default=0)
    if last <= MAX_TOKEN:
        return event
    ids = private_ids(keys)
    tokens: list[Any] = ids
    if len(ids) != len(event.token_ids):  # pairs, of speculative decoding
        tokens = list(zip(ids[::2], ids[1::2], strict=True))
    return LineageStored(
        block_hashes=event.block_hashes,
        parent_block_hash=event.parent_block_hash,
        token_ids=tokens,
        block_size=event.block_size,
        lora_id=event.lora_id,
        medium=event.medium,
        cache_salt=event.cache_salt,
        session_id=event.session_id,
        lora_name=event.lora_name,
        lineage=f"{keys[-1] >> TOKEN_BITS or last >> TOKEN_BITS:010x}",
    )


def private_ids(keys: Sequence[int]) -> list[int]:
    """Return keys with each folded one as a private id; token ids stay as they are."""
    plain = np.array(keys, dtype=np.int64)
    mixed = plain.view(np.uint64).copy()
    with np.errstate(over="ignore"):
        for multiplier, shift in zip(_MULTIPLIERS, (30, 27), strict=True):
            mixed ^= mixed >> np.uint64(shift)
            mixed *= np.uint64(multiplier)
        mixed ^= mixed >> np.uint64(31)
    private = (mixed.view(np.int64) & (PRIVATE_ID - 1)) | PRIVATE_ID
    found: list[int] = np.where(plain > MAX_TOKEN, private, plain).tolist()
    return found


def _flat(tokens: Sequence[Any]) -> list[int]:
    if tokens and isinstance(tokens[0], tuple | list):
        return [key for pair in tokens for key in pair]
    return list(tokens)
