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
    DirectiveResult,
    EditPayload,
    LineageRun,
    Mode,
    Outcome,
    Reason,
)
from leyline_engine.edits import (
    EditRefusedError,
    ResolvedEdit,
    carries_edit,
    check_lineage,
    forgets,
    resolve_edit,
)
from leyline_engine.lineage import derive_lineage, fold_keys, runs_before
from leyline_engine.plan import Plan, plan_turn
from leyline_engine.replay.cache.manager import CacheManager, ForgetResult, PoolExhaustedError
from leyline_engine.replay.cache.pool import Slots
from leyline_engine.replay.cache.radix import Match, Node

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Admission:
    """What a request starts with: its slots, its locked prefix, its plan."""

    plan: Plan
    held: Slots
    """One slot per prompt position; the first ``plan.prefix`` are the tree's."""
    node: Node
    lineage: tuple[LineageRun, ...]
    outcome: Outcome = Outcome.UNEDITED
    reason: Reason | None = None
    detail: str = ""
    directives: tuple[DirectiveResult, ...] = ()
    forgot: ForgetResult | None = None


@dataclass(frozen=True, slots=True)
class _Prefix:
    match: Match
    lineage: tuple[LineageRun, ...]


class Admitter:
    """Turns prompts and edit payloads into admissions against one cache."""

    def __init__(self, cache: CacheManager, *, splices: bool) -> None:
        self._cache = cache
        self._splices = splices

    def admit(self, prompt: array[int], payload: EditPayload | None) -> Admission:
        """Admit one request.

        Raises:
            PoolExhaustedError: no room for the prompt now; nothing was taken.
        """
        plain_keys = fold_keys(prompt)
        edit: ResolvedEdit | None = None
        refusal: EditRefusedError | None = None
        if payload is not None:
            try:
                check_lineage(payload.lineage)
                edit = self._resolve(payload, prompt) if carries_edit(payload) else None
            except EditRefusedError as error:
                refusal = error
        # What a forgotten span's readers left may not serve as prefix, nor what was refused.
        trusted = payload is not None and refusal is None and not forgets(payload)
        lineage = payload.lineage if payload is not None and trusted else ()
        scope = payload.scope if payload is not None else ""
        try:
            admission = self._place(prompt, self._match_prefix(plain_keys, lineage, scope), edit)
        except PoolExhaustedError:
            if edit is None:
                raise
            refusal = EditRefusedError(
                Reason.SOURCE_EVICTED, "no slots for the copies beside their locked sources"
            )
            admission = self._place(prompt, self._match_prefix(plain_keys, lineage, scope), None)
        except Exception:
            if edit is None:
                raise
            log.exception("splice failed; the request runs as an ordinary prefill")
            refusal = EditRefusedError(Reason.TRANSFORM_FAILED, "the splice failed in the engine")
            admission = self._place(prompt, self._match_prefix(plain_keys, (), ""), None)
        forgot = None
        if payload is not None and forgets(payload):
            # After the copies: they may draw on positions before the forgotten span.
            forgot = self._forget(payload, plain_keys, admission)
        return self._judge(admission, payload, edit, refusal, forgot)

    def _forget(
        self, payload: EditPayload, plain_keys: array[int], admission: Admission
    ) -> ForgetResult:
        try:
            return self._cache.forget((payload.scope, payload.session), plain_keys)
        except BaseException:
            self._cache.release(admission.held[admission.plan.prefix :])
            self._cache.unlock(admission.node)
            raise

    def _resolve(self, payload: EditPayload, prompt: array[int]) -> ResolvedEdit:
        if not self._splices:
            raise EditRefusedError(Reason.UNSUPPORTED_RUNTIME, "this engine doesn't splice")
        return resolve_edit(payload, prompt, self._cache.registry)

    def _match_prefix(
        self, plain_keys: array[int], lineage: tuple[LineageRun, ...], scope: str
    ) -> _Prefix:
        """The longest cached prefix; exact KV is preferred to spliced KV of equal length."""
        limit = len(plain_keys) - 1
        best = _Prefix(self._cache.match(plain_keys, limit), ())
        if lineage:
            match = self._cache.match(fold_keys(plain_keys, lineage, scope), limit)
            if match.length > best.match.length:
                best = _Prefix(match, runs_before(lineage, match.length))
        return best

    def _place(
        self,
        prompt: array[int],
        prefix: _Prefix,
        edit: ResolvedEdit | None,
    ) -> Admission:
        self._cache.lock(prefix.match.node)
        try:
            if edit is not None:
                return self._splice(prompt, prefix, edit)
            plan = plan_turn(len(prompt), prefix.match.length, (), (), sink=0)
            slots = self._cache.allocate(plan.length - plan.prefix)
            return Admission(plan, _join(prefix, slots), prefix.match.node, prefix.lineage)
        except BaseException:
            self._cache.unlock(prefix.match.node)
            raise

    def _splice(self, prompt: array[int], prefix: _Prefix, edit: ResolvedEdit) -> Admission:
        """Lock the sources, take slots, copy and rotate; on failure nothing is left behind."""
        sources = [self._cache.match(source.keys()) for source in edit.sources]
        for source in sources:
            self._cache.lock(source.node)
        slots: Slots | None = None
        try:
            plan = plan_turn(
                len(prompt),
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
            lineage = _extend_lineage(prefix.lineage, plan, edit)
            return Admission(plan, _join(prefix, slots), prefix.match.node, lineage)
        except BaseException:
            if slots is not None:
                self._cache.release(slots)
            raise
        finally:
            for source in sources:
                self._cache.unlock(source.node)

    def _judge(
        self,
        admission: Admission,
        payload: EditPayload | None,
        edit: ResolvedEdit | None,
        refusal: EditRefusedError | None,
        forgot: ForgetResult | None,
    ) -> Admission:
        """Name the outcome of the request's edit."""
        if payload is None or not (carries_edit(payload) or refusal):
            return admission
        detail = refusal.detail if refusal else ""
        if refusal is not None:
            outcome, reason = Outcome.REPREFILLED, refusal.reason
        elif admission.plan.spliced:
            outcome, reason = Outcome.SPLICED, Reason.SPLICED
        elif forgot is not None:
            outcome, reason = Outcome.REPREFILLED, Reason.REPREFILLED
        elif admission.plan.evicted:
            outcome, reason = Outcome.REPREFILLED, Reason.SOURCE_EVICTED
        else:
            outcome, reason = Outcome.REPREFILLED, Reason.NOTHING_TO_REUSE
        if forgot is not None:
            detail = (
                f"{detail + '; ' if detail else ''}forgot: {forgot.freed} overwritten, "
                f"{forgot.shared_retained} shared_retained, {forgot.pending} pending"
            )
        results = tuple(
            DirectiveResult(index, directive.mode, _directive_reason(directive.mode, reason))
            for index, directive in enumerate(payload.directives)
        )
        return replace(
            admission,
            outcome=outcome,
            reason=reason,
            detail=detail,
            directives=results,
            forgot=forgot,
        )


def _directive_reason(mode: Mode, reason: Reason) -> Reason:
    """A forget is obeyed by prefilling, also where the turn's other edits were spliced."""
    return Reason.REPREFILLED if (mode, reason) == (Mode.FORGET, Reason.SPLICED) else reason


def _join(prefix: _Prefix, slots: Slots) -> Slots:
    return np.concatenate([prefix.match.slots, slots])


def _extend_lineage(
    runs: tuple[LineageRun, ...], plan: Plan, edit: ResolvedEdit
) -> tuple[LineageRun, ...]:
    """The lineage map after a plan's copies: private from the first spliced position on."""
    if not plan.copies:
        return runs
    used = sorted({copy.source for copy in plan.copies})
    name = derive_lineage(
        runs[-1].lineage if runs else "",
        edit.payload.scope,
        [(edit.sources[index].digest, edit.sources[index].lineage) for index in used],
        plan.copies,
    )
    return (*runs, LineageRun(plan.copies[0].dest, name))
