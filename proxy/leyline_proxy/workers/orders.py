"""Orders from a supervisor to its children: one each, pickled, on the standard input.

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
from typing import Any, NoReturn, TypeVar

from ..settings import Settings

T = TypeVar("T")

USAGE_ERROR = 2
_STDIN = 0


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
    order = pickle.loads(_read(int.from_bytes(_read(4), "big")))  # noqa: S301 - the supervisor's
    if not isinstance(order, kind):
        raise TypeError(f"no {kind.__name__}")
    threading.Thread(target=_watch, daemon=True, name="supervisor").start()
    return order


def _read(count: int) -> bytes:
    found = b""
    while len(found) < count and (part := os.read(_STDIN, count - len(found))):
        found += part
    return found


def _watch() -> None:
    # Not sys.stdin, whose lock the end of the interpreter would wait for.
    os.read(_STDIN, 1)
    os.kill(os.getpid(), signal.SIGTERM)


def refuse(error: Exception) -> NoReturn:
    """End this process, and tell the operator what to change."""
    print(f"leyline serve: {error}", file=sys.stderr)
    raise SystemExit(USAGE_ERROR) from error
