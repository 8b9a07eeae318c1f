"""Batches of KV events, as SGLang and vLLM publish them. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from leyline_engine.contract import PRIVATE_ID

Kind = Literal["stored", "removed", "cleared"]

_KINDS: dict[str, Kind] = {
    "BlockStored": "stored",
    "BlockRemoved": "removed",
    "AllBlocksCleared": "cleared",
}

MAX_BLOCKS = 1 << 20
"""Blocks whose lineages are remembered, to mark them when they are removed."""


class BatchError(ValueError):
    """Bytes that are no batch of KV events; the text says what is wrong."""


@dataclass(frozen=True, slots=True)
class KVEvent:
    """One change of an engine's cache. It never has token ids: they are the prompt's text."""

    kind: Kind
    sequence: int
    """Number of its batch at the publisher."""
    rank: int | None
    """Data-parallel rank of the engine."""
    blocks: tuple[int, ...] = ()
    """Hashes of the blocks."""
    parent: int | None = None
    """Hash of the block in front of the first one; None at a prompt's beginning."""
    tokens: int = 0
    private: int = 0
    """Tokens that only one conversation finds: they are spliced, or come after a splice."""
    lineage: str = ""
    """Mark of this conversation's lineage; empty for blocks that anybody may find."""
    medium: str = ""
    """Memory in which the blocks are."""
    salted: bool = False
    """True if only a tenant's requests find the blocks."""


class Lineages:
    """The lineages of one publisher's blocks, at most :data:`MAX_BLOCKS`."""

    def __init__(self, limit: int = MAX_BLOCKS) -> None:
        self._limit = limit
        self._marks: OrderedDict[int, str] = OrderedDict()

    def store(self, blocks: tuple[int, ...], mark: str) -> None:
        """Remember the lineage of blocks, if they have one."""
        for block in blocks:
            self._marks.pop(block, None)
            if mark:
                self._marks[block] = mark
        while len(self._marks) > self._limit:
            self._marks.popitem(last=False)

    def remove(self, blocks: tuple[int, ...]) -> str:
        """Forget blocks, and return the lineage that all of them had; empty if none or several."""
        marks = {self._marks.pop(block, "") for block in blocks}
        return marks.pop() if len(marks) == 1 else ""

    def clear(self) -> None:
        """Forget all blocks."""
        self._marks.clear()


def read_batch(payload: bytes, sequence: int, lineages: Lineages) -> Iterator[KVEvent]:
    """Yield the events of one message.

    Args:
        lineages: of the same publisher's blocks; updated.

    Raises:
        BatchError: the message is no batch.
    """
    try:
        batch = msgspec.msgpack.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BatchError("not MessagePack: is this the endpoint of KV events?") from error
    match batch:
        case [float() | int(), [*events], *rest]:
            rank = rest[0] if rest and isinstance(rest[0], int) else None
        case _:
            raise BatchError("no batch of KV events: [time, events, rank] is expected")
    for raw in events:
        yield _event(raw, sequence, rank, lineages)


def _event(raw: Any, sequence: int, rank: int | None, lineages: Lineages) -> KVEvent:
    if not isinstance(raw, dict) or raw.get("type") not in _KINDS:
        raise BatchError("an event is a map whose type is one of " + ", ".join(_KINDS))
    kind = _KINDS[raw["type"]]
    blocks = tuple(block for block in raw.get("block_hashes") or () if isinstance(block, int))
    medium = str(raw.get("medium") or "")
    if kind == "cleared":
        lineages.clear()
        return KVEvent(kind, sequence, rank)
    if kind == "removed":
        lineage = lineages.remove(blocks)
        return KVEvent(kind, sequence, rank, blocks, lineage=lineage, medium=medium)
    tokens = _flat(raw.get("token_ids") or ())
    lineage = str(raw.get("lineage") or "")
    lineages.store(blocks, lineage)
    return KVEvent(
        kind,
        sequence,
        rank,
        blocks,
        parent=raw.get("parent_block_hash"),
        tokens=len(tokens),
        private=sum(token >= PRIVATE_ID for token in tokens),
        lineage=lineage,
        medium=medium,
        salted=bool(raw.get("cache_salt")),
    )


def _flat(tokens: Any) -> list[int]:
    """Return the last token of each pair, and all others, so that positions are counted once."""
    return [each[-1] if isinstance(each, list | tuple) else each for each in tokens]


def document(event: KVEvent, endpoint: str) -> dict[str, Any]:
    """Return an event as a line of JSON: hashes in hexadecimal, as JSON's numbers are too short."""
    return {
        "endpoint": endpoint,
        "event": event.kind,
        "sequence": event.sequence,
        "rank": event.rank,
        "blocks": [shown(block) for block in event.blocks],
        "parent": None if event.parent is None else shown(event.parent),
        "tokens": event.tokens,
        "private": event.private,
        "lineage": event.lineage or None,
        "medium": event.medium or None,
        "salted": event.salted,
    }


def shown(block: int) -> str:
    """Return a block's hash as 16 hexadecimal digits."""
    return f"{block & (1 << 64) - 1:016x}"
