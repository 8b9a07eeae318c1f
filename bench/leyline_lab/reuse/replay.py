"""The replay engine as what ``leyline bench reuse`` measures, imported only where it is needed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from leyline_proxy.upstream.embedded import EngineUnavailable

from ..packages import replay_engine

if TYPE_CHECKING:
    from .replay_engine import ReplayReuseBench


def open_bench(model: str | None, tokens: int) -> ReplayReuseBench:
    """Return the benchmark of the replay engine over a model.

    Raises:
        EngineUnavailable: missing packages, or the model can't be loaded.
    """
    with replay_engine():
        from .replay_engine import ReplayReuseBench
    try:
        return ReplayReuseBench(model, tokens)
    except Exception as error:
        kind = type(error).__name__
        raise EngineUnavailable(f"The replay engine can't start ({kind}): {error}") from error
