"""The requests, measurements and figures of ``leyline bench reuse``. Pure, without tensors."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from statistics import fmean, median
from typing import Any


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """A prompt in tokens, and the session that sends it."""

    session: str
    tokens: array[int]


@dataclass(frozen=True, slots=True)
class Closeness:
    """A distribution at each generated position, compared with the full prefill's.

    Both are computed along the full prefill's greedy tokens.
    """

    kl: tuple[float, ...]
    """KL(p_full || p_x) in nats, by position."""
    equal: tuple[bool, ...]
    """True where both have the same likeliest token."""

    @property
    def first_divergence(self) -> int:
        """Number of equal tokens before the first other one of free-running greedy decoding.

        Up to there the tokens that are fed back are the same, forced or not.
        """
        return self.equal.index(False) if False in self.equal else len(self.equal)


@dataclass(frozen=True, slots=True)
class Sample:
    """One request, served once by each arm; None or absent is not measured."""

    prompt: int
    """Number of its tokens, as all counts below."""
    prefix: int
    reused: int
    recoverable: int | None
    arms: Mapping[str, int] = field(default_factory=dict)
    """Tokens beyond the prefix that other methods find in the same live sequences, by method."""
    radix_prefix: int = 0
    """The prefix with reuse off."""
    live_ms: float | None = None
    """Time to the first token."""
    radix_ms: float | None = None
    """The same with reuse off."""
    live: Closeness | None = None
    naive: Closeness | None = None
    naive_reused: int | None = None
    """The tokens that the control copied: the same, unless it is broken."""


GOAL = 0.98
"""Share of the recoverable tokens that reuse is to serve."""
SHARES = ("prefix", "additional", "total")
CLOSENESS = ("kl", "argmax_match", "first_divergence")


def pattern_json(samples: Sequence[Sample]) -> dict[str, Any]:
    """Return the document's member for one pattern; a measure that wasn't taken is None."""
    tokens = _totals(samples)
    reused, recoverable = tokens["reused"], _recoverable(samples)
    live = _closeness([sample.live for sample in samples])
    shares = _shares(tokens, reused)
    return {
        **shares,
        "recoverable": None if recoverable is None else _share(recoverable, tokens["prompt"]),
        "ttft_ratio_to_radix": _ratio(samples),
        **live,
        "goal_met": None if recoverable is None else reused >= GOAL * recoverable,
        "requests": len(samples),
        "tokens": tokens | {"recoverable": recoverable},
        "arms": {
            "leyline": {**shares, **live, "ttft_ms": _median(s.live_ms for s in samples)},
            "radix": {
                "prefix": _share(sum(s.radix_prefix for s in samples), tokens["prompt"]),
                "ttft_ms": _median(s.radix_ms for s in samples),
            },
            "naive": _naive(tokens, samples),
            **{name: _shares(tokens, tokens[name]) for name in _methods(samples)},
        },
    }


def _naive(tokens: dict[str, int], samples: Sequence[Sample]) -> dict[str, float | None]:
    reused = [sample.naive_reused for sample in samples if sample.naive_reused is not None]
    known = len(reused) == len(samples)
    shares = _shares(tokens, sum(reused)) if known else dict.fromkeys(SHARES)
    return {**shares, **_closeness([sample.naive for sample in samples])}


def _totals(samples: Sequence[Sample]) -> dict[str, int]:
    found = {
        name: sum(getattr(sample, name) for sample in samples)
        for name in ("prompt", "prefix", "reused")
    }
    for name in _methods(samples):
        found[name] = sum(sample.arms[name] for sample in samples)
    return found


def _recoverable(samples: Sequence[Sample]) -> int | None:
    known = [sample.recoverable for sample in samples if sample.recoverable is not None]
    return sum(known) if len(known) == len(samples) else None


def _methods(samples: Sequence[Sample]) -> list[str]:
    """Return the methods that were measured on every request."""
    return [name for name in samples[0].arms if all(name in sample.arms for sample in samples)]


def _shares(tokens: dict[str, int], additional: int) -> dict[str, float]:
    """Return :data:`SHARES` of an arm that serves ``additional`` tokens beyond the prefix."""
    return {
        "prefix": _share(tokens["prefix"], tokens["prompt"]),
        "additional": _share(additional, tokens["prompt"]),
        "total": _share(tokens["prefix"] + additional, tokens["prompt"]),
    }


def _share(part: int, whole: int) -> float:
    return round(part / whole, 6)


def _ratio(samples: Sequence[Sample]) -> float | None:
    """Return the median of ratios; the first request is left out, as nothing is cached then."""
    return _median(
        sample.live_ms / sample.radix_ms
        for sample in samples[1:]
        if sample.live_ms is not None and sample.radix_ms
    )


def _median(values: Any) -> float | None:
    known = [value for value in values if value is not None]
    return round(median(known), 4) if known else None


def _closeness(found: Sequence[Closeness | None]) -> dict[str, float | None]:
    known = [closeness for closeness in found if closeness is not None]
    if not known:
        return dict.fromkeys(CLOSENESS)
    return {
        "kl": fmean(chain.from_iterable(closeness.kl for closeness in known)),
        "argmax_match": round(fmean(chain.from_iterable(c.equal for c in known)), 6),
        "first_divergence": round(fmean(c.first_divergence for c in known), 4),
    }
