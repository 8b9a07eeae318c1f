"""A hub and its workers, in one event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from leyline_proxy.hub.link import HubLink
from leyline_proxy.hub.server import HubServer, Part


@asynccontextmanager
async def hub(path: Path, *parts: Part) -> AsyncIterator[HubServer]:
    """A hub that listens at ``path``."""
    server = HubServer(path, {str(number): part for number, part in enumerate(parts)})
    await server.open()
    try:
        yield server
    finally:
        await server.aclose()


@asynccontextmanager
async def link(path: Path, index: int = 0) -> AsyncIterator[HubLink]:
    """A worker's link to the hub at ``path``."""
    opened = HubLink(path, index, "a secret of the tests")
    await opened.open()
    try:
        yield opened
    finally:
        await opened.aclose()
