"""The origin of a tenant's prompt tokens over the last hour, in steps. Pure."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass

from leyline_engine.contract import TokenCounts

STEP_S = 30
STEPS = 120
MAX_TENANTS = 1024
"""Bound of the tenants; the last seen are kept."""


@dataclass(slots=True)
class Step:
    """Sums of the turns that ended within ``STEP_S`` seconds."""

    start: int
    """Seconds since the epoch."""
    turns: int = 0
    prompt: int = 0
    cached: int = 0
    spliced: int = 0
    reused: int = 0
    freed: int = 0
    thinking_kept: int = 0
    """Tokens copied after stripped thinking, which ``exact`` would have prefilled."""
    thinking_lost: int = 0
    """Tokens prefilled after stripped thinking, which ``amortize`` would have copied."""


class Trends:
    """Steps by tenant; one without turns isn't kept."""

    def __init__(self) -> None:
        self._steps: OrderedDict[str, deque[Step]] = OrderedDict()

    def add(
        self, tenant: str, now: float, tokens: TokenCounts, thinking: tuple[int, int] = (0, 0)
    ) -> None:
        """Count one turn.

        Args:
            thinking: tokens kept and lost after stripped thinking.
        """
        steps = self._steps.get(tenant)
        if steps is None:
            steps = self._steps[tenant] = deque(maxlen=STEPS)
            if len(self._steps) > MAX_TENANTS:
                self._steps.popitem(last=False)
        else:
            self._steps.move_to_end(tenant)
        start = int(now // STEP_S) * STEP_S
        if not steps or steps[-1].start != start:
            steps.append(Step(start))
        step = steps[-1]
        step.turns += 1
        step.prompt += tokens.prompt
        step.cached += tokens.prefix
        step.spliced += tokens.spliced
        step.reused += tokens.reused
        step.freed += tokens.freed
        step.thinking_kept += thinking[0]
        step.thinking_lost += thinking[1]

    def of(self, tenant: str, now: float) -> list[Step]:
        """Return the tenant's steps of the last hour, oldest first."""
        since = now - STEP_S * STEPS
        return [step for step in self._steps.get(tenant, ()) if step.start >= since]
