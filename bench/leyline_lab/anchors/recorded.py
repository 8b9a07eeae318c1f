"""Turns of recorded sessions, as an engine's admission finds them; no model runs."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from leyline_engine.admit.plan import Plan, plan_turn
from leyline_engine.contract import ATTENTION_SINK, CopySegment, EditPayload
from leyline_engine.records.lineage import fold_keys
from leyline_proxy.model.undeclared import UndeclaredRules
from leyline_proxy.render.renderer import ChatRenderer
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
    """Radix keys of each source."""

    def plan(self, prefix: int, **terms: Any) -> Plan:
        """Return the product's plan from a cached prefix, with what else the engine knows."""
        return plan_turn(
            self.length,
            prefix,
            self.copies,
            [len(source) for source in self.sources],
            sink=ATTENTION_SINK,
            min_copy=MIN_COPY,
            stage_cost=STAGE_COST,
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
        starts = sorted({label.start for label in admission.spans})
        written = prompt + output[:-1]
        turn = Turn(
            fold_keys(written, admission.lineage, payload.scope),
            len(prompt),
            admission.plan.prefix,
            tuple(starts),
            admission.edited,
            tuple(source.keys() for source in admission.sources),
        )
        self.turns.append(turn)
        super()._publish(admission, prompt, output, payload)


def sessions(
    trace: Trace, renderer: ChatRenderer, undeclared: Sequence[str]
) -> Iterator[tuple[Turn, ...]]:
    """Yield each session's turns, each session on an engine of its own.

    Args:
        undeclared: rules ``ROLE=amortize`` for the harness's own edits; without any, nothing is
            copied.
    """
    rules = UndeclaredRules.parse(undeclared)
    for session in trace.sessions:
        caches: list[_RecordingCache] = []

        def opened(tokens: int | None, page_tokens: int) -> DryCache:
            caches.append(_RecordingCache(tokens=tokens, page_tokens=page_tokens))  # noqa: B023
            return caches[-1]  # noqa: B023

        player = Player(renderer, rules=rules, open_cache=opened)
        player.play(replace(trace, sessions=(session,), skipped=()), "")
        yield tuple(caches[0].turns)
