"""Waiting and running requests, fair across tenant scopes. Pure."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class ScopedQueues(Generic[T]):
    """Items in one queue per scope; scopes take turns, whatever the length of their queues."""

    def __init__(self) -> None:
        self._queues: OrderedDict[str, deque[T]] = OrderedDict()

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    def __iter__(self) -> Iterator[T]:
        for queue in self._queues.values():
            yield from queue

    def push(self, scope: str, item: T) -> None:
        self._queues.setdefault(scope, deque()).append(item)

    def push_front(self, scope: str, item: T) -> None:
        """Put an item back where :meth:`remove` took it from."""
        self._queues.setdefault(scope, deque()).appendleft(item)

    def remove(self, scope: str, item: T) -> None:
        """Take an item out, wherever it is.

        Raises:
            KeyError, ValueError: the item isn't there.
        """
        queue = self._queues[scope]
        queue.remove(item)
        if not queue:
            del self._queues[scope]

    def heads(self) -> list[tuple[str, T]]:
        """Return the first item of each scope, the scope that waited longest for a turn first."""
        return [(scope, queue[0]) for scope, queue in self._queues.items()]

    def count(self, scope: str) -> int:
        return len(self._queues.get(scope, ()))

    def take_turn(self, scope: str) -> T:
        """Return the scope's first item; it and its scope go to the end of their queues.

        Raises:
            KeyError: the scope has no items.
        """
        queue = self._queues[scope]
        queue.rotate(-1)
        self._queues.move_to_end(scope)
        return queue[-1]
