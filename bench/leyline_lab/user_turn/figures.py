"""The figures of ``leyline bench user-turn``: samples added up, goals, JSON. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import fmean
from typing import Any

from ..replay.results import RequestResult
from ..replay.unchanged import lcs_length, unchanged_tokens
from ..three_arm.figures import quantiles

BEYOND = 0.01
"""Most tokens prefilled beyond changed and new ones, as a share of the prompt."""
REUSED = 0.99
"""Least share of the unchanged tokens that is reused."""


class TurnArm(StrEnum):
    """A way to serve the same agent."""

    RADIX = "radix"
    """Exact prefixes only."""
    STRIP = "strip"
    """The same, and the server forgets what it generates: SGLang's --strip-thinking-cache."""
    SPLICE = "splice"
    """Leyline, with its default settings."""
    FULL = "full"
    """Nothing cached: what the answers are compared with."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """Agreement of one answer with that of the same prompt, prefilled in full."""

    equal_tokens: int
    """Tokens before the first other one."""
    tokens: int
    """Tokens of the reference."""
    logit_delta: float | None
    """Largest difference of log probabilities; see :mod:`..three_arm.reference`."""
    equal: bool


@dataclass(frozen=True, slots=True)
class UserTurn:
    """The first request after one of the user's messages."""

    session: int
    result: RequestResult
    changed: int
    """Prompt tokens that the turn before doesn't have, in order."""
    unchanged: int
    """Those that it has, where the contract lets them be reused."""
    agreement: Agreement | None = None

    @classmethod
    def compared(
        cls, session: int, result: RequestResult, before: Sequence[int], prompt: Sequence[int]
    ) -> UserTurn:
        """Return the turn with its counts.

        Args:
            before: tokens of the turn before that were computed, its answer's included.
            prompt: tokens of this turn's prompt.
        """
        changed = len(prompt) - lcs_length(before, prompt)
        return cls(session, result, changed, unchanged_tokens(before, prompt))

    @property
    def beyond(self) -> float:
        """Tokens prefilled beyond changed and new ones, as a share of the prompt."""
        return max(0, self.result.prefilled - self.changed) / self.result.prompt

    @property
    def reused(self) -> float:
        """Share of the unchanged tokens that was reused; at most 1."""
        if not self.unchanged:
            return 1.0
        return min(1.0, self.result.reused_past_sink / self.unchanged)


@dataclass(slots=True)
class ArmSamples:
    """All that was measured of one arm."""

    turns: list[UserTurn] = field(default_factory=list)
    loop: list[RequestResult] = field(default_factory=list)
    """Requests of the loops, but for each session's first."""


def arm_json(samples: ArmSamples) -> dict[str, Any]:
    """Return means of tokens per request, quantiles of times, and agreement."""
    turns = samples.turns
    return {
        **tokens_json([turn.result for turn in turns]),
        "changed_and_new_tokens": round(fmean(turn.changed for turn in turns), 2),
        "most_prefilled_beyond": round(max(turn.beyond for turn in turns), 6),
        "unchanged_reused": _share(
            sum(min(turn.result.reused_past_sink, turn.unchanged) for turn in turns),
            sum(turn.unchanged for turn in turns),
        ),
        "least_unchanged_reused": round(min(turn.reused for turn in turns), 6),
        "agreement": agreement_json(turns),
        "loop_prefilled_tokens": _mean([result.prefilled for result in samples.loop]),
    }


def tokens_json(results: Sequence[RequestResult]) -> dict[str, Any]:
    """Return means of tokens per request, and quantiles of the time to the first token."""
    return {
        "requests": len(results),
        "prompt_tokens": _mean([result.prompt for result in results]),
        "cached_tokens": _mean([result.cached for result in results]),
        "spliced_tokens": _mean([result.spliced for result in results]),
        "prefilled_tokens": _mean([result.prefilled for result in results]),
        "ttft_ms": quantiles([r.ttft_ms for r in results if r.ttft_ms is not None]),
    }


def agreement_json(turns: Sequence[UserTurn]) -> dict[str, Any] | None:
    """Return shares of sessions, answers and tokens; None if nothing was compared."""
    found = [(turn.session, turn.agreement) for turn in turns if turn.agreement is not None]
    if not found:
        return None
    deltas = [each.logit_delta for _, each in found if each.logit_delta is not None]
    sessions = {session for session, _ in found}
    differing = {session for session, each in found if not each.equal}
    return {
        "sessions": _share(len(sessions - differing), len(sessions)),
        "answers": _share(sum(each.equal for _, each in found), len(found)),
        "tokens": _share(
            sum(each.equal_tokens for _, each in found), sum(each.tokens for _, each in found)
        ),
        "logit_delta": max(deltas) if deltas else None,
    }


def goals(turns: Sequence[UserTurn]) -> dict[str, Any]:
    """Return each goal of the splice arm, with the worst request's value and the result."""
    beyond = max(turn.beyond for turn in turns)
    reused = min(turn.reused for turn in turns)
    return {
        "prefilled_beyond": {
            "measured": round(beyond, 6),
            "at_most": BEYOND,
            "met": beyond <= BEYOND,
        },
        "unchanged_reused": {
            "measured": round(reused, 6),
            "at_least": REUSED,
            "met": reused >= REUSED,
        },
    }


def document(
    arms: Mapping[TurnArm, ArmSamples],
    floor: Sequence[RequestResult],
    full: Sequence[RequestResult],
    missing: Mapping[TurnArm, str],
) -> dict[str, Any]:
    """Return the document's members by arm, the floor, and the goals.

    Args:
        floor: the same prompts with another last message, the rest cached.
        full: the splice arm's prompts, with nothing cached.
        missing: arms that couldn't be measured, with the reasons.
    """
    found: dict[str, Any] = {}
    for arm in TurnArm:
        if arm in missing:
            found[arm.value] = {"available": False, "reason": missing[arm]}
        elif arm in arms and arms[arm].turns:
            found[arm.value] = {"available": True, **arm_json(arms[arm])}
    if full:
        found[TurnArm.FULL.value] = {"available": True, **tokens_json(full)}
    splice = arms[TurnArm.SPLICE].turns if TurnArm.SPLICE in arms else []
    return {
        "arms": found,
        "floor": tokens_json(floor) if floor else None,
        "goal": goals(splice) if splice else {},
    }


def _share(part: int, whole: int) -> float:
    return round(part / whole, 6) if whole else 1.0


def _mean(values: Sequence[int]) -> float | None:
    return round(fmean(values), 2) if values else None
