"""The figures of the three-arm benchmark: samples added up, goals, JSON. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from ..replay.results import percentile
from .workload import MustPrefill

TTFT_TO_FLOOR = 1.3


class BenchArm(StrEnum):
    """A way to serve the same conversations, all on one server."""

    OFF = "off"
    """Nothing reused: a separate cache namespace for every request."""
    RADIX = "radix"
    """Exact prefixes only: requests without an envelope."""
    SPLICE = "splice"
    """Leyline."""
    NAIVE = "naive"
    """The control: spliced, keys not rotated."""


class Phase(StrEnum):
    """The measured requests of a session."""

    EDIT = "edit"
    REPLAY = "replay"


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured request; times in ms."""

    prompt: int
    spliced: int
    prefilled: int
    ttft_ms: float
    e2e_ms: float
    logit_delta: float | None = None
    excess: int = 0
    """Tokens prefilled beyond the necessary ones."""


@dataclass(frozen=True, slots=True)
class FloorSample:
    """The same number of new tokens after a fully cached prefix of the same length."""

    must: MustPrefill
    cached: int
    ttft_ms: float
    forward_ms: float


@dataclass(frozen=True, slots=True)
class PhaseFigures:
    """One phase at one concurrency."""

    arms: Mapping[BenchArm, Sequence[Sample]]
    floor: Sequence[FloorSample]

    def to_json(self) -> dict[str, Any]:
        """Return members by arm, ``floor`` and, with a splice arm, ``goal``."""
        document: dict[str, Any] = {
            arm.value: arm_json(samples) for arm, samples in self.arms.items() if samples
        }
        if self.floor:
            document["floor"] = floor_json(self.floor)
        return document


def arm_json(samples: Sequence[Sample]) -> dict[str, Any]:
    """Return means of tokens per request, quantiles of times, and the worst logit delta."""
    prompt = sum(sample.prompt for sample in samples)
    prefilled = sum(sample.prefilled for sample in samples)
    deltas = [sample.logit_delta for sample in samples if sample.logit_delta is not None]
    return {
        "requests": len(samples),
        "prompt_tokens": round(prompt / len(samples), 2),
        "hit_ratio": round(1 - prefilled / prompt, 6),
        "spliced_tokens": round(sum(s.spliced for s in samples) / len(samples), 2),
        "prefilled_tokens": round(prefilled / len(samples), 2),
        "most_beyond_must_prefill": max(sample.excess for sample in samples),
        "ttft_ms": quantiles([sample.ttft_ms for sample in samples]),
        "e2e_ms": quantiles([sample.e2e_ms for sample in samples]),
        "logit_delta": max(deltas) if deltas else None,
    }


def floor_json(samples: Sequence[FloorSample]) -> dict[str, Any]:
    """Return the tokens that had to be prefilled, itemised, and the floor's times."""
    items = {
        name: round(sum(asdict(sample.must)[name] for sample in samples) / len(samples), 2)
        for name in ("replacements", "tail", "sink", "boundary", "pages", "staged")
    }
    return {
        "must_prefill_tokens": round(sum(s.must.total for s in samples) / len(samples), 2),
        "must_prefill": items,
        "cached_tokens": round(sum(sample.cached for sample in samples) / len(samples), 2),
        "ttft_ms": quantiles([sample.ttft_ms for sample in samples]),
        "forward_ms": quantiles([sample.forward_ms for sample in samples])["p50"],
    }


def quantiles(values: Sequence[float]) -> dict[str, float | None]:
    """Return the median and the ninth decile."""
    ordered = sorted(values)
    return {"p50": percentile(ordered, 0.5), "p90": percentile(ordered, 0.9)}


def radix_share(concurrency: int) -> float:
    """Return the goal for splice's median first token, as a share of radix'."""
    return 0.1 if concurrency == 1 else 0.25


def goals(figures: Mapping[str, Any], concurrency: int) -> dict[str, Any]:
    """Return each goal of the splice arm with the measured value and the result.

    Args:
        figures: of one phase, as :meth:`PhaseFigures.to_json` gives them.

    Returns:
        Empty without the required arms.
    """
    splice, radix, floor = (figures.get(name) for name in ("splice", "radix", "floor"))
    if splice is None:
        return {}
    found = {"prefilled": _goal(splice["most_beyond_must_prefill"], 0)}
    ttft = splice["ttft_ms"]["p50"]
    if floor is not None:
        bound = TTFT_TO_FLOOR * floor["ttft_ms"]["p50"]
        bound += floor["must_prefill"]["staged"] * floor["forward_ms"]
        found["ttft_to_floor"] = _goal(round(ttft, 3), round(bound, 3))
    if radix is not None:
        share = ttft / radix["ttft_ms"]["p50"]
        found["ttft_share_of_radix"] = _goal(round(share, 4), radix_share(concurrency))
    return found


def _goal(measured: float, bound: float) -> dict[str, Any]:
    return {"measured": measured, "bound": bound, "met": measured <= bound}


def level_json(phases: Mapping[Phase, PhaseFigures], concurrency: int) -> dict[str, Any]:
    """Return the document's member for one concurrency: the replay, with the edit in it."""
    document = phases[Phase.REPLAY].to_json()
    document["goal"] = goals(document, concurrency)
    edit = phases[Phase.EDIT].to_json()
    edit["goal"] = goals(edit, concurrency)
    document["edit"] = edit
    return document
