"""The listener that learns what becomes of slots."""

from __future__ import annotations

from collections.abc import Sequence

from leyline_replay.cache.radix import Node
from leyline_replay.cache.slots import Slots


class CacheListener:
    """Ignores all calls; subclasses override some. Called on the engine's thread."""

    def matched(self, request: str, slots: Slots) -> None:
        """Note that a request locked these slots: the longest cached prefix of its prompt."""

    def evicted(self, request: str, gone: Sequence[Node]) -> None:
        """Note that these nodes were evicted for a request; their slots are free."""

    def allocated(self, request: str, count: int) -> None:
        """Note that a request took ``count`` slots."""

    def published(self, request: str, path: Slots, spare: int) -> None:
        """Note that the KV computed by a request is in the tree.

        Args:
            path: all slots of its sequence, as the tree has them now.
            spare: slots that the request gave back because the tree had their keys.
        """

    def undone(self, request: str, count: int) -> None:
        """Note that a request gave ``count`` slots back unpublished, and is admitted again."""

    def ended(self, request: str, count: int) -> None:
        """Note that a request ended, and gave ``count`` slots back."""

    def losing(self, slots: Slots, cause: str) -> None:
        """Note that cached slots are about to be lost, whatever the claims on them."""

    def flushing(self) -> None:
        """Note that all KV without a running request is about to be dropped."""

    def flushed(self) -> None:
        """Note that it has been dropped."""
