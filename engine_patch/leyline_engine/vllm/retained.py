"""Hashes of the blocks of retained turns, kept so that no splice hashes its sources again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from leyline_engine.records.publications import Space
from leyline_engine.records.sources import SessionKey, SourceTurn
from leyline_engine.vllm.block_keys import LineageKeys, PathHasher


class RetainedKeys:
    """Keys of retained turns' blocks.

    Args:
        hasher: hashes turns that weren't noted.
        block: tokens per block.
    """

    def __init__(self, hasher: PathHasher, block: int) -> None:
        self._hasher = hasher
        self._block = block
        self._plain: dict[tuple[SessionKey, str], tuple[SourceTurn, list[bytes]]] = {}

    def note(self, source: SourceTurn, plain: Sequence[bytes]) -> None:
        """Note the plain hashes of a turn's full blocks."""
        self._plain[_name(source)] = source, list(plain)

    def drop(self, source: SourceTurn) -> None:
        """Drop the hashes of a turn that isn't retained any more."""
        self._plain.pop(_name(source), None)

    def clear(self) -> None:
        """Drop all hashes."""
        self._plain.clear()

    def of(self, source: SourceTurn) -> Iterator[bytes]:
        """Yield the keys of a turn's full blocks, lazily."""
        noted, plain = self._plain.get(_name(source), (None, []))
        if noted is not source:  # it may be retained no more, and another be called the same
            plain = self._hasher.plain(source.tokens, Space(source.extra_key, source.cache_salt))
        return LineageKeys(source.lineage, source.scope, self._block).over(plain)


def _name(source: SourceTurn) -> tuple[SessionKey, str]:
    return (source.scope, source.session), source.turn
