"""Admission: match, check the edit, plan, take slots, splice. All or nothing.

A splice is applied once, here; while it runs, the prefix and every source are locked. Whatever
goes wrong on the way, slots and locks go back and the request runs as an ordinary prefill.
"""

from __future__ import annotations

import logging
from array import array
from dataclasses import dataclass, replace

import numpy as np

from leyline_engine.contract import (
    ATTENTION_SINK,
    EditPayload,
    ForgetCounts,
    LineageRun,
    Reason,
    SpanLabel,
)
from leyline_engine.edits import ResolvedEdit
from leyline_engine.ledger import Carried, SpanKey
from leyline_engine.lineage import fold_keys, runs_before
from leyline_engine.plan import Plan, plan_turn
from leyline_engine.replay.cache.manager import CacheManager, PoolExhaustedError
from leyline_engine.replay.cache.pool import Slots
from leyline_engine.replay.cache.radix import Match, Node
from leyline_engine.rules import CheckedRequest, Rules, Verdict, extend_lineage, judge

log = logging.getLogger(__name__)

_UNJUDGED = Verdict()


@dataclass(frozen=True, slots=True)
class Admission:
    """What a request starts with: its slots, its locked prefix, its plan."""

    plan: Plan
    held: Slots
    """One slot per prompt position; the first ``plan.prefix`` are the tree's."""
    node: Node
    lineage: tuple[LineageRun, ...]
    verdict: Verdict = _UNJUDGED
    forgot: ForgetCounts | None = None
    carried: Carried | None = None
    """What the splice hides; to be entered into the ledger when its KV is published."""
    struck: frozenset[SpanKey] = frozenset()
    """Spans that were forgotten; running requests that carry them are not to be published."""
    spans: tuple[SpanLabel, ...] = ()
    """The prompt's labels, empty where they can't be relied on."""


@dataclass(frozen=True, slots=True)
class _Prefix:
    match: Match
    lineage: tuple[LineageRun, ...]


class Admitter:
    """Turns prompts and edit payloads into admissions against one cache."""

    def __init__(self, cache: CacheManager, *, splices: bool) -> None:
        self._cache = cache
        self._rules = Rules(cache.registry, cache.ledger, splices=splices)

    def admit(self, message_id: str, prompt: array[int], payload: EditPayload | None) -> Admission:
        """Admit one request.

        Raises:
            PoolExhaustedError: no room for the prompt now; nothing was taken.
        """
        request = self._rules.check(prompt, payload)
        try:
            admission = self._place(request, self._match_prefix(request))
        except PoolExhaustedError:
            if request.edit is None:
                raise
            request = request.refused(
                Reason.SOURCE_EVICTED, "no slots for the copies beside their locked sources"
            )
            admission = self._place(request, self._match_prefix(request))
        except Exception:
            if request.edit is None:
                raise
            log.exception("splice failed; the request runs as an ordinary prefill")
            request = request.refused(Reason.TRANSFORM_FAILED, "the splice failed in the engine")
            admission = self._place(request, _Prefix(self._match(fold_keys(prompt)), ()))
        if payload is not None and request.forgets:
            # After the copies: they may draw on positions before the forgotten span.
            admission = self._forget(message_id, request, payload, admission)
        verdict = judge(request, admission.plan, admission.forgot)
        return replace(admission, verdict=verdict, spans=request.spans)

    def _forget(
        self, message_id: str, request: CheckedRequest, payload: EditPayload, admission: Admission
    ) -> Admission:
        # What the prompt found is clean: it lies before the forgotten spans' first reader.
        found = fold_keys(request.prompt, admission.lineage, payload.scope)[: admission.plan.prefix]
        try:
            forgotten = self._cache.forget(
                (payload.scope, payload.session),
                request.forgotten,
                spared=(fold_keys(request.prompt), found),
                ticket=message_id,
            )
        except BaseException:
            self._cache.release(admission.held[admission.plan.prefix :])
            self._cache.unlock(admission.node)
            raise
        return replace(admission, forgot=forgotten.counts, struck=forgotten.spans)

    def _match(self, keys: array[int]) -> Match:
        """The longest cached prefix that leaves a token to compute."""
        return self._cache.match(keys, len(keys) - 1)

    def _match_prefix(self, request: CheckedRequest) -> _Prefix:
        """The longest cached prefix; exact KV is preferred to spliced KV of equal length."""
        best = _Prefix(self._match(fold_keys(request.prompt)), ())
        scope = request.payload.scope if request.payload is not None else ""
        for lineage in self._rules.maps(request):
            keys = fold_keys(request.prompt, lineage, scope)
            match = self._cache.match(keys, self._rules.clean_length(request, lineage))
            if match.length > best.match.length:
                best = _Prefix(match, runs_before(lineage, match.length))
        return best

    def _place(self, request: CheckedRequest, prefix: _Prefix) -> Admission:
        self._cache.lock(prefix.match.node)
        try:
            if request.edit is not None:
                return self._splice(request, prefix, request.edit)
            plan = plan_turn(len(request.prompt), prefix.match.length, (), (), sink=0)
            slots = self._cache.allocate(plan.length - plan.prefix)
            return Admission(plan, _join(prefix, slots), prefix.match.node, prefix.lineage)
        except BaseException:
            self._cache.unlock(prefix.match.node)
            raise

    def _splice(self, request: CheckedRequest, prefix: _Prefix, edit: ResolvedEdit) -> Admission:
        """Lock the sources, take slots, copy and rotate; on failure nothing is left behind."""
        sources = [self._cache.match(source.keys()) for source in edit.sources]
        locked: list[Node] = []
        slots: Slots | None = None
        try:
            for source in sources:
                self._cache.lock(source.node)
                locked.append(source.node)
            plan = plan_turn(
                len(request.prompt),
                prefix.match.length,
                edit.copies,
                [source.length for source in sources],
                sink=max(edit.payload.sink, ATTENTION_SINK),
            )
            slots = self._cache.allocate(plan.length - plan.prefix)
            for copy in plan.copies:
                target = slots[copy.dest - plan.prefix : copy.dest_end - plan.prefix]
                origin = sources[copy.source].slots[copy.start : copy.end]
                self._cache.pool.copy(origin, target, copy.dest)
            carried = self._rules.carry(request, prefix.lineage, plan)
            lineage = extend_lineage(prefix.lineage, carried)
            return Admission(
                plan, _join(prefix, slots), prefix.match.node, lineage, carried=carried
            )
        except BaseException:
            if slots is not None:
                self._cache.release(slots)
            raise
        finally:
            for node in locked:
                self._cache.unlock(node)


def _join(prefix: _Prefix, slots: Slots) -> Slots:
    return np.concatenate([prefix.match.slots, slots])
