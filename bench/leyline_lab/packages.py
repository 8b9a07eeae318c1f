"""Packages that only some measurements need: an error names them and the fix."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from leyline_proxy.installing import pip_install
from leyline_proxy.upstream.embedded import EngineUnavailable


@contextmanager
def replay_engine() -> Iterator[None]:
    """Turn a missing package, where the replay engine is imported, into an error with its fix.

    Raises:
        EngineUnavailable: a package of the replay engine is missing.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise EngineUnavailable(
            f"The replay engine needs the package {error.name!r}. "
            f"Install it with: {pip_install('engine')}"
        ) from error
