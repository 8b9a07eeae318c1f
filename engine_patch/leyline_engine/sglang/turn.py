"""One request with an envelope, from the scheduler's queue to its end: state and phases."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from leyline_engine.admit.edits import EditRefusedError
from leyline_engine.admit.plan import Plan
from leyline_engine.admit.rules import CheckedRequest
from leyline_engine.contract import (
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
from leyline_engine.records.publications import Space
from leyline_engine.records.sources import SessionKey, SourceTurn

_MAPS = 2
"""Maps whose keys are kept: that of the request, and one under which it may be cached."""

Map = tuple[LineageRun, ...]


class TurnKeys:
    """Keys of a request's tokens, by lineage map.

    Only those of its prompt are kept: what a request generates may change if it is retracted.

    Args:
        scope: its tenant.
    """

    def __init__(self, scope: str) -> None:
        self._scope = scope
        self._prompt = array("q")
        self._made: OrderedDict[Map, array[int]] = OrderedDict()

    def of(self, tokens: array[int], lineage: Map, prompt: array[int]) -> array[int]:
        """Return the keys of tokens under a map. They may be shared: nobody may change them.

        Args:
            tokens: the first tokens of the request, its prompt and what it generated.
            prompt: its prompt; another one than before makes all keys anew.
        """
        if not lineage:
            return tokens
        known = self._of_prompt(lineage, prompt)
        if len(tokens) <= len(prompt):
            return known if len(tokens) == len(prompt) else known[: len(tokens)]
        return known + fold_keys(tokens[len(prompt) :], lineage, self._scope, start=len(prompt))

    def _of_prompt(self, lineage: Map, prompt: array[int]) -> array[int]:
        if prompt is not self._prompt:
            self._made.clear()
            self._prompt = prompt
        if lineage not in self._made:
            self._made[lineage] = fold_keys(prompt, lineage, self._scope)
            if len(self._made) > _MAPS:
                self._made.popitem(last=False)
        self._made.move_to_end(lineage)
        return self._made[lineage]


class Phase(StrEnum):
    """The phase of a turn."""

    NEW = "new"
    """No part of it was checked."""
    STAGING = "staging"
    """Its copies are being made; gaps between them are computed by stage rows."""
    READY = "ready"
    """All that can be copied is in the tree; it is admitted like any request."""
    RUNNING = "running"
    """SGLang runs it, or will again after a retraction."""
    ENDED = "ended"


TRANSITIONS: Final[dict[Phase, frozenset[Phase]]] = {
    Phase.NEW: frozenset({Phase.STAGING, Phase.READY, Phase.ENDED}),
    Phase.STAGING: frozenset({Phase.NEW, Phase.READY, Phase.ENDED}),
    Phase.READY: frozenset({Phase.NEW, Phase.RUNNING, Phase.ENDED}),
    Phase.RUNNING: frozenset({Phase.ENDED}),
    Phase.ENDED: frozenset(),
}


class PhaseError(RuntimeError):
    """A turn was moved to a phase that doesn't follow its own; a bug of the engine."""


@dataclass(slots=True)
class Source:
    """A locked source: its slots in position order."""

    slots: Any
    """int64 tensor ``[n]``."""
    lock: Any

    def __len__(self) -> int:
        return int(self.slots.numel())


@dataclass(slots=True)
class Staging:
    """The state of a splice that is under way."""

    sources: list[Source]
    lock: Any
    """Lock on the node at which the prompt's cached part ends."""
    cursor: int
    """Tokens of the prompt that are cached so far."""
    row: Any = None
    """SGLang request that computes the gap at ``cursor``, if one is under way."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class Turn:
    """The state beside an SGLang request."""

    req: Any
    message_id: str
    payload: EditPayload | None
    refusal: EditRefusedError | None = None
    skipped: tuple[SkippedAction, ...] = ()
    reuse: ReusePayload | None = None
    prove: ProvePayload | None = None
    """The demand for a proof of what it forgets."""
    reuses: bool = True
    """False once copies for reuse failed, found no room, or may not be made: it runs without."""
    gated: bool = False
    """True if it runs without reuse because the margin of an earlier turn was too small."""
    reading: Any = None
    """Margin of its prefill, on its way from the device."""
    judged: bool = False
    """True once its margin was compared with the threshold."""
    phase: Phase = Phase.NEW
    lineage: tuple[LineageRun, ...] = ()
    """Lineage map under which the request matches and publishes."""
    checked: CheckedRequest | None = None
    plan: Plan | None = None
    carried: Carried | None = None
    """Spans that its splice hides."""
    staging: Staging | None = None
    restarts: int = 0
    loaded: int = 0
    """Tokens of its gaps that were loaded from the host's memory, not computed."""
    withheld: bool = False
    """True if a forget made KV that it computes unfit to keep."""
    private: bool = False
    """True if a claim keeps KV that it computes out of the tree."""
    forgot: ForgetCounts | None = None
    rests: bool = False
    """True if its forget took the scheduler's step: it is admitted in the next one."""
    started_ns: int = 0
    spent_ns: int = 0
    receipt: Receipt | None = None
    computed: SourceTurn | None = None
    """Its prompt in the index of content, until it ends."""
    noted: int = 0
    """Length of the path that was noted as published."""
    _turn_keys: TurnKeys | None = None

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
        return Space(self.req.extra_key, self.req.cache_salt)

    def space_of(self, source: SourceTurn) -> Space:
        """Return the namespace that has a source's KV as this turn may take it.

        An ``extra_key`` stands for what computes KV, such as an adapter: another one's is no use.
        """
        if source.scope == self.scope:
            return self.space
        return Space(self.req.extra_key, source.cache_salt)

    def keys(self, tokens: array[int]) -> array[int]:
        """Return the radix keys of a prefix of this turn."""
        return self.keys_under(self.lineage, tokens)

    def keys_under(self, lineage: tuple[LineageRun, ...], tokens: array[int]) -> array[int]:
        """Return the same under another map."""
        if not lineage:
            return tokens
        if self._turn_keys is None:
            self._turn_keys = TurnKeys(self.scope)
        return self._turn_keys.of(tokens, lineage, self.req.origin_input_ids)

    def move(self, phase: Phase) -> None:
        """Enter a phase.

        Raises:
            PhaseError: it doesn't follow the current one.
        """
        if phase not in TRANSITIONS[self.phase]:
            raise PhaseError(f"{self.phase} is not followed by {phase}")
        self.phase = phase
