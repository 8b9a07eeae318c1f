"""One request with an envelope, from vLLM's waiting queue to its end: state and phases."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from leyline_engine.admit.edits import EditRefusedError
from leyline_engine.admit.plan import Plan
from leyline_engine.admit.rules import CheckedRequest
from leyline_engine.contract import (
    CopySegment,
    EditPayload,
    ForgetCounts,
    LineageRun,
    ProvePayload,
    Receipt,
    ReusePayload,
    SkippedAction,
    SpanLabel,
)
from leyline_engine.records.ledger import Carried
from leyline_engine.records.lineage import fold_keys
from leyline_engine.records.publications import Publication, Space
from leyline_engine.records.sources import SessionKey
from leyline_engine.vllm.block_keys import RequestKeys, space_of


class Phase(StrEnum):
    """The phase of a turn."""

    NEW = "new"
    """It waits; what was planned for it doesn't hold any more."""
    PLANNED = "planned"
    """Its copies are planned and their sources held; vLLM hasn't given it blocks yet."""
    STAGING = "staging"
    """It runs, and some of its copies wait for the gap in front of them to be computed."""
    RUNNING = "running"
    """All copies are made, or none was to be."""
    ENDED = "ended"


TRANSITIONS: Final[dict[Phase, frozenset[Phase]]] = {
    Phase.NEW: frozenset({Phase.PLANNED, Phase.RUNNING, Phase.ENDED}),
    Phase.PLANNED: frozenset({Phase.NEW, Phase.STAGING, Phase.RUNNING, Phase.ENDED}),
    Phase.STAGING: frozenset({Phase.NEW, Phase.RUNNING, Phase.ENDED}),
    # A run that was to be copied may fail; the turn is planned again without it.
    Phase.RUNNING: frozenset({Phase.NEW, Phase.ENDED}),
    Phase.ENDED: frozenset(),
}


class PhaseError(RuntimeError):
    """A turn was moved to a phase that doesn't follow its own; a bug of the engine."""


@dataclass(slots=True)
class Staging:
    """Copies that are yet to be made, and what they need."""

    sources: dict[int, list[Any]]
    """By source, its cached blocks from the first token on."""
    pinned: list[Any]
    """Blocks among them that are held."""
    runs: list[tuple[CopySegment, ...]]
    """Runs of copies that follow one another, the next one first."""
    loaded: int = 0
    """Tokens of the first run if it follows the cached prefix: vLLM is to take them for loaded."""
    begun: bool = False
    """True if the request's next token is the one after the first run, whose rows are yet to be
    copied."""

    @property
    def next_dest(self) -> int | None:
        """Position at which the next run begins; None if there is none, or it has begun."""
        return None if self.begun or not self.runs else self.runs[0][0].dest


@dataclass(slots=True, eq=False)
class Turn:
    """The state beside a vLLM request."""

    req: Any
    message_id: str
    keys: RequestKeys
    payload: EditPayload | None = None
    refusal: EditRefusedError | None = None
    skipped: tuple[SkippedAction, ...] = ()
    reuse: ReusePayload | None = None
    prove: ProvePayload | None = None
    prompt: array[int] = field(default_factory=lambda: array("q"))
    phase: Phase = Phase.NEW
    checked: CheckedRequest | None = None
    lineage: tuple[LineageRun, ...] = ()
    """Lineage map under which its blocks are filed."""
    prefix: int = 0
    """Tokens of its prompt that vLLM found cached."""
    plan: Plan | None = None
    carried: Carried | None = None
    """Spans that its splice hides."""
    staging: Staging | None = None
    receipt: Receipt | None = None
    forgot: ForgetCounts | None = None
    forgetting: bool = False
    """True once its forget was carried out."""
    withheld: bool = False
    kept: int = 0
    """Leading tokens that its session still has although it is withheld."""
    private: bool = False
    gated: bool = False
    reuses: bool = True
    spent_ns: int = 0

    @property
    def runs(self) -> bool:
        """True if vLLM has given it blocks."""
        return self.phase in {Phase.STAGING, Phase.RUNNING}

    @property
    def spoilt(self) -> bool:
        """True if some of its copies failed: its splice was refused after it had begun."""
        refused = self.checked is not None and self.checked.edit is None
        return self.runs and refused and self.carried is not None

    @property
    def spans(self) -> tuple[SpanLabel, ...]:
        """Labels of the parts of the prompt; empty before it is checked, or if that failed."""
        return self.checked.spans if self.checked is not None else ()

    @property
    def scope(self) -> str:
        return self.payload.scope if self.payload is not None else ""

    @property
    def session(self) -> SessionKey | None:
        return (self.payload.scope, self.payload.session) if self.payload is not None else None

    @property
    def space(self) -> Space:
        return space_of(self.req)

    def path(self, tokens: Sequence[int]) -> Publication:
        """Return the path of a prefix of this turn, as it is filed."""
        keys = fold_keys(tokens, self.lineage, self.scope)
        return Publication(keys, self.lineage, self.space)

    def file_under(self, lineage: tuple[LineageRun, ...]) -> None:
        """File the request's blocks under a lineage map, unless they are withheld."""
        self.lineage = lineage
        if not self.withheld:
            self.keys.use(self.req, lineage, self.scope)

    def move(self, phase: Phase) -> None:
        """Enter a phase.

        Raises:
            PhaseError: it doesn't follow the current one.
        """
        if phase not in TRANSITIONS[self.phase]:
            raise PhaseError(f"{self.phase} is not followed by {phase}")
        self.phase = phase
