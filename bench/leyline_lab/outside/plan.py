"""The plan of a comparison: every choice that its figures depend on. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .arms import OutsideArm
from .benchmarks import Benchmark, Endpoint, Job
from .tasks import Selection

VERSION = 1


@dataclass(frozen=True, slots=True)
class Run:
    """One repeat of the benchmark in one arm."""

    arm: OutsideArm
    number: int
    """From 1."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A comparison."""

    benchmark: Benchmark
    upstream: str
    """Base URL of the engine, without ``/v1``."""
    model: str
    arms: tuple[OutsideArm, ...]
    policy: str
    out: Path
    """Absolute."""
    checkout: Path = Path()
    selection: Selection = field(default_factory=Selection)
    repeat: int = 1
    workers: int = 1
    config: str | None = None
    extra: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    profile: Path | None = None
    tokenizer: str | None = None
    between: tuple[str, ...] = ()
    """Command in front of every run, such as one that empties the engine's cache."""
    patience_s: float = 60.0
    """Longest time without a ready engine."""

    def runs(self) -> tuple[Run, ...]:
        """Return the runs in order: arms take turns, so that a slow hour hits all of them."""
        return tuple(Run(arm, number) for number in range(1, self.repeat + 1) for arm in self.arms)

    def folder(self, run: Run) -> Path:
        """Return the folder of a run."""
        return self.out / run.arm.value / f"run-{run.number}"

    def job(self, run: Run, endpoint: Endpoint) -> Job:
        """Return a run as the benchmark needs it."""
        return Job(
            endpoint=endpoint,
            model=self.model,
            folder=self.folder(run),
            selection=self.selection,
            workers=self.workers,
            config=self.config,
            extra=self.extra,
            checkout=self.checkout,
            tokenizer=self.tokenizer,
            number=run.number,
        )

    def document(self) -> dict[str, Any]:
        """Return the choices that figures depend on. Arms and repeats may be added later."""
        source = self.benchmark.source
        return {
            "version": VERSION,
            "benchmark": self.benchmark.name,
            "repository": source.repository if source else None,
            "commit": source.commit if source else None,
            "command": list(self.command),
            "model": self.model,
            "policy": self.policy,
            "tasks": str(self.selection),
            "config": self.config,
            "extra": list(self.extra),
            "workers": self.workers,
        }
