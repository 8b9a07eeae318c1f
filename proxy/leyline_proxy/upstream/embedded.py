"""Engines within the proxy's process, found by entry point and never by import."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, cast

import httpx
from starlette.applications import Starlette

from ..errors import ProxyError, closest
from ..installing import REPLAY_ENGINE, pip_install
from .client import read
from .pool import ReplicaPool

ENGINE_GROUP = "leyline.engines"
EMBEDDED_BASE_URL = "http://engine.embedded"


class EngineUnavailable(Exception):  # noqa: N818 - an operator's mistake, reported at start-up
    """The embedded engine can't be created; the message gives the fix."""


def create_embedded_engine(name: str, options: Mapping[str, Any]) -> Starlette:
    """Return the engine application that entry point ``name`` creates from ``options``.

    Raises:
        EngineUnavailable: an unknown name, missing packages or a wrong option.
    """
    known: dict[str, EntryPoint] = {point.name: point for point in entry_points(group=ENGINE_GROUP)}
    if name not in known:
        if name == "replay":
            raise EngineUnavailable(
                "The embedded engine isn't installed: it is a distribution of its own, "
                f"{REPLAY_ENGINE}. {_how_to_install()}"
            )
        raise EngineUnavailable(f"There is no engine {name!r}. {closest(name, known)}")
    try:
        factory = cast("Callable[..., Starlette]", known[name].load())
    except ModuleNotFoundError as error:
        raise EngineUnavailable(
            f"The engine {name!r} needs the package {error.name!r}. {_how_to_install()}"
        ) from error
    try:
        return factory(**options)
    except TypeError as error:
        raise EngineUnavailable(f"The engine {name!r} refuses its options: {error}") from error
    except Exception as error:  # an engine's own errors can't be imported here
        kind = type(error).__name__
        raise EngineUnavailable(f"The engine {name!r} can't start ({kind}): {error}") from error


def _how_to_install() -> str:
    return (
        f"Install it with: {pip_install('proxy', 'engine')} (PyTorch for CPUs; without that "
        "index 5.7 GB of CUDA come along), or give --upstream URL."
    )


async def embedded_metrics(pool: ReplicaPool, accept: str) -> bytes:
    """Return the embedded engine's ``/metrics``; empty without such an engine, or if it fails.

    Args:
        accept: the header that asks for a format.
    """
    client = pool.first.client
    if client.address != EMBEDDED_BASE_URL:
        return b""
    own = [(b"accept", accept.encode("latin-1"))]
    try:
        async with client.open(
            "GET", "/metrics", headers=(), own=own, timeout_s=client.small_timeout_s
        ) as response:
            text = await read(response)
    except ProxyError:
        return b""
    return text if response.status_code == httpx.codes.OK else b""
