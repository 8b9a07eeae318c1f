"""Turns of recorded sessions, as an engine's admission finds them; no model runs."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from leyline_engine.admit.plan import Plan, plan_turn
from leyline_engine.contract import ATTENTION_SINK, CopySegment, EditPayload
from leyline_engine.records.lineage import fold_keys
from leyline_replay.admission import Admission
from leyline_replay.dry_run import DryCache

from ..roi.playing import Player
from ..traces.recordings import Trace

MIN_COPY, STAGE_COST = 32, 64
"""Defaults of the plugins, in tokens."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request, with all that a planner needs but anchors."""

    keys: array[int]
    """Radix keys of prompt and answer; equal keys are equal rows, and equal state."""
    length: int
    """Prompt tokens."""
    prefix: int
    """Tokens whose rows a prefix cache has."""
    boundaries: tuple[int, ...]
    """Position in the prompt where each message begins, ascending."""
    copies: tuple[CopySegment, ...] = ()
    """Copies that the edit declares; empty if it doesn't splice."""
    sources: tuple[array[int], ...] = ()
    """Radix keys of each source, as far as it is cached."""

    def plan(self, prefix: int, stage_cost: int = STAGE_COST, **terms: Any) -> Plan:
        """Return the product's plan from a cached prefix, with what else the engine knows."""
        return plan_turn(
            self.length,
            prefix,
            self.copies,
            [len(source) for source in self.sources],
            sink=ATTENTION_SINK,
            min_copy=MIN_COPY,
            stage_cost=stage_cost,
            **terms,
        )


class _RecordingCache(DryCache):
    """A cache that keeps the turns that it has served."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.turns: list[Turn] = []

    def _publish(
        self, admission: Admission, prompt: array[int], output: array[int], payload: EditPayload
    ) -> None:
        turn = Turn(
            fold_keys(prompt + output[:-1], admission.lineage, payload.scope),
            len(prompt),
            admission.plan.prefix,
            tuple(sorted({label.start for label in admission.spans})),
            admission.edited,
            tuple(self._cached(source.keys()) for source in admission.sources),
        )
        self.turns.append(turn)
        super()._publish(admission, prompt, output, payload)

    def _cached(self, keys: array[int]) -> array[int]:
        return keys[: len(self._cache.tree.peek(keys))]


def sessions(trace: Trace, player: Player) -> Iterator[tuple[Turn, ...]]:
    """Yield each session's turns, each session on an engine of its own."""
    for session in trace.sessions:
        caches: list[_RecordingCache] = []

        def opened(tokens: int | None, page_tokens: int) -> DryCache:
            caches.append(_RecordingCache(tokens=tokens, page_tokens=page_tokens))  # noqa: B023
            return caches[-1]  # noqa: B023

        alone = replace(trace, sessions=(session,), skipped=())
        replace(player, open_cache=opened).play(alone, "")
        yield tuple(caches[0].turns)
