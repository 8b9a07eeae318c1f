"""The measurements of a replay: one record per request, added up per arm."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from .unchanged import SINK


class Arm(StrEnum):
    """A way to serve the same requests."""

    OFF = "off"
    """No reuse at all: every prompt token is prefilled. Computed, not run."""
    RADIX = "radix"
    """Exact prefixes only, as in an engine without Leyline."""
    SPLICE = "splice"
    """Edits become directives, and the engine splices its cache."""


@dataclass(frozen=True, slots=True)
class RequestResult:
    """The sources of one prompt's tokens; ``cached + spliced + reused + prefilled == prompt``."""

    session: int
    """Index of the session in the trace."""
    turn: int
    """Index of the request in its session."""
    prompt: int
    cached: int
    """Exact prefix, tokens."""
    spliced: int
    prefilled: int
    ttft_ms: float | None
    reason: str | None = None
    """The receipt's reason; None for a request without an edit."""
    reused: int = 0
    """Copied because the same content was cached elsewhere, tokens."""

    @property
    def served(self) -> int:
        """Tokens that were not prefilled."""
        return self.cached + self.spliced + self.reused

    @property
    def reused_past_sink(self) -> int:
        """Tokens reused after the positions of the sink rule."""
        return max(0, self.cached - SINK) + self.spliced + self.reused


@dataclass(frozen=True, slots=True)
class ArmRun:
    """All requests of one arm, in the order sent."""

    arm: Arm
    results: tuple[RequestResult, ...]
    notes: tuple[str, ...] = ()
    """Sessions that ended early, with the reasons."""

    def switched_off(self) -> ArmRun:
        """Return the same requests without any reuse."""
        results = tuple(
            RequestResult(
                session=result.session,
                turn=result.turn,
                prompt=result.prompt,
                cached=0,
                spliced=0,
                prefilled=result.prompt,
                ttft_ms=None,
            )
            for result in self.results
        )
        return ArmRun(Arm.OFF, results)


@dataclass(frozen=True, slots=True)
class ArmSummary:
    """One arm's totals."""

    requests: int
    prompt_tokens: int
    cached_tokens: int
    spliced_tokens: int
    prefilled_tokens: int
    ttft_p50_ms: float | None
    ttft_p90_ms: float | None
    outcomes: Mapping[str, int]
    reused_tokens: int = 0

    @property
    def hit_ratio(self) -> float:
        """Share of the prompt tokens that were not prefilled; 0 without any tokens."""
        served = self.cached_tokens + self.spliced_tokens + self.reused_tokens
        return _share(served, self.prompt_tokens) or 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the member of the report under the arm's name."""
        return {
            "requests": self.requests,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "spliced_tokens": self.spliced_tokens,
            "reused_tokens": self.reused_tokens,
            "prefilled_tokens": self.prefilled_tokens,
            "hit_ratio": self.hit_ratio,
            "ttft_ms": {"p50": self.ttft_p50_ms, "p90": self.ttft_p90_ms},
            "outcomes": dict(self.outcomes),
        }


@dataclass(frozen=True, slots=True)
class Pages:
    """Pages of the engine, and the places at which they may cost a part of one."""

    tokens: int = 1
    """Tokens per page."""
    prefixes: Mapping[tuple[int, int], int] = field(default_factory=dict)
    """Tokens with which each request begins like the one before it, by (session, turn)."""

    def rounded_off(self, result: RequestResult, unchanged: int) -> int:
        """Return the unchanged tokens that a request lost because prefixes end with a page.

        Those are the tokens from the cached prefix's end to the common prefix's, if that is less
        than a page, as far as nothing was copied in their place.
        """
        common = self.prefixes.get((result.session, result.turn), 0)
        cut = common - result.cached
        lost = unchanged - result.reused_past_sink
        return max(0, min(cut, lost)) if cut < self.tokens else 0


UnchangedCounts = Mapping[tuple[int, int], int]
"""Unchanged tokens by (session, turn), for every request with a predecessor."""


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """The arms side by side, with each one's share of the reusable tokens."""

    runs: Mapping[Arm, ArmRun]
    unchanged: UnchangedCounts
    pages: Pages = Pages()

    def summary(self, arm: Arm) -> ArmSummary:
        """Return the totals of one arm."""
        return summarise(self.runs[arm])

    @property
    def unchanged_tokens(self) -> int:
        """Unchanged tokens of all requests."""
        return sum(self.unchanged.values())

    def reuse_of_unchanged(self, arm: Arm) -> float | None:
        """Return the share of the unchanged tokens that the arm reused; None if there are none.

        At most a request's own unchanged tokens count, so a prefix shared with an older branch
        cannot make up for a miss elsewhere.
        """
        reused = sum(
            min(result.reused_past_sink, self.unchanged.get((result.session, result.turn), 0))
            for result in self.runs[arm].results
        )
        return _share(reused, self.unchanged_tokens)

    def rounding(self, arm: Arm) -> int:
        """Return the unchanged tokens that the arm lost to whole pages; see :class:`Pages`."""
        return sum(
            self.pages.rounded_off(result, self.unchanged.get((result.session, result.turn), 0))
            for result in self.runs[arm].results
        )

    def reuse_without_rounding(self, arm: Arm) -> float | None:
        """Return :meth:`reuse_of_unchanged` of the tokens that pages don't cost."""
        share = self.reuse_of_unchanged(arm)
        rest = self.unchanged_tokens - self.rounding(arm)
        return (
            None
            if share is None or not rest
            else round(min(1.0, share * self.unchanged_tokens / rest), 6)
        )

    def to_json(self) -> dict[str, Any]:
        """Return the document that ``leyline replay --json`` writes."""
        return {
            "page_tokens": self.pages.tokens,
            "rounding_tokens": {arm.value: self.rounding(arm) for arm in self.runs},
            "reuse_without_rounding": {
                arm.value: self.reuse_without_rounding(arm) for arm in self.runs
            },
            "arms": {arm.value: self.summary(arm).to_json() for arm in self.runs},
            "unchanged_tokens": self.unchanged_tokens,
            "reuse_of_unchanged": {arm.value: self.reuse_of_unchanged(arm) for arm in self.runs},
        }


def summarise(run: ArmRun) -> ArmSummary:
    """Add up one arm."""
    times = sorted(result.ttft_ms for result in run.results if result.ttft_ms is not None)
    reasons = Counter(result.reason for result in run.results if result.reason is not None)
    return ArmSummary(
        requests=len(run.results),
        prompt_tokens=sum(result.prompt for result in run.results),
        cached_tokens=sum(result.cached for result in run.results),
        spliced_tokens=sum(result.spliced for result in run.results),
        reused_tokens=sum(result.reused for result in run.results),
        prefilled_tokens=sum(result.prefilled for result in run.results),
        ttft_p50_ms=percentile(times, 0.5),
        ttft_p90_ms=percentile(times, 0.9),
        outcomes=dict(sorted(reasons.items())),
    )


def percentile(ordered: Sequence[float], share: float) -> float | None:
    """Interpolate linearly between the closest ranks of an ascending list; None if it is empty."""
    if not ordered:
        return None
    rank = share * (len(ordered) - 1)
    low = int(rank)
    high = min(low + 1, len(ordered) - 1)
    return round(ordered[low] + (ordered[high] - ordered[low]) * (rank - low), 3)


def _share(part: int, whole: int) -> float | None:
    return round(part / whole, 6) if whole else None
