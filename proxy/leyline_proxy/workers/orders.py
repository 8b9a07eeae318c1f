"""What a supervisor gives its children: one pickled order on the standard input.

The pipe stays open for as long as the supervisor lives.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from ..settings import Settings

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class WorkerOrder:
    """Serve the port beside other workers."""

    settings: Settings
    index: int
    hub: Path
    """The hub's Unix socket."""
    secret: str = field(repr=False)
    """Random text that all workers of this start share."""
    handover: int
    """File descriptor of the socket by which it gets its connections."""
    engine: Path | None
    """Unix socket of the embedded engine."""


@dataclass(frozen=True, slots=True)
class EngineOrder:
    """Run the embedded engine."""

    name: str
    options: dict[str, Any]
    socket: Path
    """Unix socket to serve on; it exists once the engine serves."""
    log_level: str
    log_format: str


def packed(order: WorkerOrder | EngineOrder) -> bytes:
    """Return an order as a child reads it."""
    data = pickle.dumps(order)
    return len(data).to_bytes(4, "big") + data


def read_order(kind: type[T]) -> T:
    """Return this process's order; end it, as if by SIGTERM, once the supervisor has gone.

    Raises:
        TypeError: it is no such order.
    """
    stream = sys.stdin.buffer
    order = pickle.loads(stream.read(int.from_bytes(stream.read(4), "big")))  # noqa: S301 - own
    if not isinstance(order, kind):
        raise TypeError(f"no {kind.__name__}")
    threading.Thread(target=_watch, daemon=True, name="supervisor").start()
    return order


def _watch() -> None:
    sys.stdin.buffer.read()
    os.kill(os.getpid(), signal.SIGTERM)
