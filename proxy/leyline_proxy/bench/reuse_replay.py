"""The replay engine's part of ``leyline bench reuse``, found by entry point and never by import."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, cast

from leyline_engine.benches.reuse_samples import BenchRequest, Sample

from ..upstream.embedded import EngineUnavailable, load_replay_part

GROUP = "leyline.reuse_benches"
"""Group of entry points: functions of a model's name or None, and of the tokens per answer."""


class ReuseBench(Protocol):
    """Measures requests on one model, in this process."""

    @property
    def name(self) -> str:
        """Name of the model."""

    def tokenise(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text separately, without special tokens."""

    def measure(
        self, requests: Sequence[BenchRequest], advance: Callable[[], None]
    ) -> list[Sample]:
        """Serve requests one after the other, by every arm, from empty caches."""


def open_bench(model: str | None, tokens: int) -> ReuseBench:
    """Return the benchmark of the replay engine over a model.

    Raises:
        EngineUnavailable: missing packages, or the model can't be loaded.
    """
    opened = load_replay_part(GROUP)
    try:
        return cast("ReuseBench", opened(model, tokens))
    except Exception as error:  # an engine's own errors can't be imported here
        kind = type(error).__name__
        raise EngineUnavailable(f"The replay engine can't start ({kind}): {error}") from error
