"""The replay engine's part of ``leyline bench reuse``, found by entry point and never by import."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from typing import Protocol, cast

from leyline_engine.benches.reuse_samples import BenchRequest, Sample

from ..installing import pip_install
from ..upstream.embedded import EngineUnavailable

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
    points = entry_points(group=GROUP, name="replay")
    if not points:
        raise EngineUnavailable("This installation is older than its code: install it again.")
    try:
        opened = next(iter(points)).load()
    except ModuleNotFoundError as error:
        raise EngineUnavailable(
            f"The replay engine needs the package {error.name!r}. "
            f"Install it with: {pip_install('proxy', 'engine')}"
        ) from error
    try:
        return cast("ReuseBench", opened(model, tokens))
    except Exception as error:  # an engine's own errors can't be imported here
        kind = type(error).__name__
        raise EngineUnavailable(f"The replay engine can't start ({kind}): {error}") from error
