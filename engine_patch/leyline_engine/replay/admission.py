"""Admission: match, check the edit, plan, take slots, splice. All or nothing.

A splice is applied once, here; while it runs, the prefix and every source are locked. Whatever
goes wrong on the way, slots and locks go back and the request runs as an ordinary prefill.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from leyline_engine.contract import (
    ATTENTION_SINK,
    DirectiveResult,
    EditPayload,
    ForgetCounts,
    LineageRun,
    Mode,
    Outcome,
    Reason,
    SpanLabel,
    common_prefix,
)
from leyline_engine.edits import (
    EditRefusedError,
    ResolvedEdit,
    carries_edit,
    check_lineage,
    check_spans,
    forgets,
    forgotten_spans,
    resolve_edit,
)
from leyline_engine.ledger import Carried, SpanKey
from leyline_engine.lineage import (
    derive_lineage,
    first_spliced,
    fold_keys,
    runs_before,
    share_lineage,
)
from leyline_engine.plan import Plan, plan_turn
from leyline_engine.replay.cache.manager import CacheManager, PoolExhaustedError
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


@dataclass(frozen=True, slots=True)
class _Request:
    """A prompt with its payload, checked as far as it goes."""

    prompt: array[int]
    keys: array[int]
    """Exact radix keys."""
    payload: EditPayload | None
    edit: ResolvedEdit | None
    refusal: EditRefusedError | None
    spans: tuple[SpanLabel, ...]
    forgotten: frozenset[SpanKey] | None
    """None where nothing is forgotten, or where the ledger can't tell what."""


class Admitter:
    """Turns prompts and edit payloads into admissions against one cache."""

    def __init__(self, cache: CacheManager, *, splices: bool) -> None:
        self._cache = cache
        self._splices = splices

    def admit(self, message_id: str, prompt: array[int], payload: EditPayload | None) -> Admission:
        """Admit one request.

        Raises:
            PoolExhaustedError: no room for the prompt now; nothing was taken.
        """
        request = self._check(prompt, payload)
        try:
            admission = self._place(request, self._match_prefix(request))
        except PoolExhaustedError:
            if request.edit is None:
                raise
            request = _refused(
                request,
                Reason.SOURCE_EVICTED,
                "no slots for the copies beside their locked sources",
            )
            admission = self._place(request, self._match_prefix(request))
        except Exception:
            if request.edit is None:
                raise
            log.exception("splice failed; the request runs as an ordinary prefill")
            request = _refused(request, Reason.TRANSFORM_FAILED, "the splice failed in the engine")
            admission = self._place(request, _Prefix(self._match(request.keys), ()))
        if payload is not None and forgets(payload):
            # After the copies: they may draw on positions before the forgotten span.
            admission = self._forget(message_id, request, payload, admission)
        return replace(self._judge(admission, request), spans=request.spans)

    def _check(self, prompt: array[int], payload: EditPayload | None) -> _Request:
        keys = fold_keys(prompt)
        edit: ResolvedEdit | None = None
        refusal: EditRefusedError | None = None
        spans: tuple[SpanLabel, ...] = ()
        forgotten: frozenset[SpanKey] | None = None
        if payload is not None:
            try:
                check_spans(payload.spans, len(prompt))
                spans = payload.spans
                check_lineage(payload.lineage)
                edit = self._resolve(payload, prompt) if carries_edit(payload) else None
            except EditRefusedError as error:
                refusal = error
            if edit is not None:
                forgotten = edit.forgotten
            elif forgets(payload):
                forgotten = forgotten_spans(payload, (), self._cache.ledger)
        return _Request(prompt, keys, payload, edit, refusal, spans, forgotten)

    def _forget(
        self, message_id: str, request: _Request, payload: EditPayload, admission: Admission
    ) -> Admission:
        # What the prompt found is clean: it lies before the forgotten spans' first reader.
        found = fold_keys(request.prompt, admission.lineage, payload.scope)[: admission.plan.prefix]
        try:
            forgotten = self._cache.forget(
                (payload.scope, payload.session),
                request.forgotten,
                spared=(request.keys, found),
                ticket=message_id,
            )
        except BaseException:
            self._cache.release(admission.held[admission.plan.prefix :])
            self._cache.unlock(admission.node)
            raise
        return replace(admission, forgot=forgotten.counts, struck=forgotten.spans)

    def _resolve(self, payload: EditPayload, prompt: array[int]) -> ResolvedEdit:
        if not self._splices:
            raise EditRefusedError(Reason.UNSUPPORTED_RUNTIME, "this engine doesn't splice")
        return resolve_edit(payload, prompt, self._cache.registry, self._cache.ledger)

    def _match(self, keys: array[int]) -> Match:
        """The longest cached prefix that leaves a token to compute."""
        return self._cache.match(keys, len(keys) - 1)

    def _match_prefix(self, request: _Request) -> _Prefix:
        """The longest cached prefix; exact KV is preferred to spliced KV of equal length."""
        best = _Prefix(self._match(request.keys), ())
        payload = request.payload
        if payload is None:
            return best
        for lineage in self._lineages(request, payload):
            keys = fold_keys(request.prompt, lineage, payload.scope)
            match = self._cache.match(keys, self._clean_length(request, payload, lineage))
            if match.length > best.match.length:
                best = _Prefix(match, runs_before(lineage, match.length))
        return best

    def _lineages(
        self, request: _Request, payload: EditPayload
    ) -> Iterator[tuple[LineageRun, ...]]:
        """Lineage maps under which the prompt may be cached: its own, then what is shared."""
        if request.refusal is not None:
            return
        if payload.lineage:
            yield payload.lineage
        if payload.share:
            for start in self._cache.ledger.shared_starts(payload.scope, payload.share):
                yield (LineageRun(start, share_lineage(payload.share)),)

    def _clean_length(
        self, request: _Request, payload: EditPayload, lineage: tuple[LineageRun, ...]
    ) -> int:
        """How much of the prompt a lineage may serve: nothing that read what is forgotten now."""
        limit = len(request.prompt) - 1
        if not forgets(payload):
            return limit
        if request.forgotten is None:
            return first_spliced(lineage, limit)
        return self._cache.ledger.hidden_reader(lineage, payload.scope, request.forgotten, limit)

    def _place(self, request: _Request, prefix: _Prefix) -> Admission:
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

    def _splice(self, request: _Request, prefix: _Prefix, edit: ResolvedEdit) -> Admission:
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
            carried = self._carry(request.prompt, prefix.lineage, plan, edit)
            lineage = _extend_lineage(prefix.lineage, carried)
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

    def _carry(
        self, prompt: array[int], runs: tuple[LineageRun, ...], plan: Plan, edit: ResolvedEdit
    ) -> Carried | None:
        """The lineage that a plan's copies begin, and the readers that they bring along."""
        if not plan.copies:
            return None
        payload = edit.payload
        used = sorted({copy.source for copy in plan.copies})
        name = share_lineage(payload.share) or derive_lineage(
            runs[-1].lineage if runs else "",
            payload.scope,
            [
                (self._cache.registry.seal(edit.sources[index]), edit.sources[index].lineage)
                for index in used
            ],
            plan.copies,
        )
        ledger = self._cache.ledger
        shared = [common_prefix(source.tokens, prompt) for source in edit.sources]
        readers = ledger.carry(edit.sources, plan.copies, shared)
        if not payload.share:
            # Who has these runs remembers them from there on; a shared lineage has other parents.
            known = ledger.remembered(runs, payload.scope, plan.copies[0].dest)
            readers = {span: at for span, at in readers.items() if span not in known}
        goes_on = bool(runs) and runs[-1].lineage == name
        start = runs[-1].start if goes_on else plan.copies[0].dest
        return Carried(name, start, readers, payload.share)

    def _judge(self, admission: Admission, request: _Request) -> Admission:
        """Name the outcome of the request's edit."""
        payload, refusal = request.payload, request.refusal
        if payload is None or not (carries_edit(payload) or refusal or _reached(admission.forgot)):
            return admission
        if refusal is not None:
            outcome, reason = Outcome.REPREFILLED, refusal.reason
        elif admission.plan.spliced:
            outcome, reason = Outcome.SPLICED, Reason.SPLICED
        elif admission.forgot is not None:
            outcome, reason = Outcome.REPREFILLED, Reason.REPREFILLED
        elif admission.plan.evicted:
            outcome, reason = Outcome.REPREFILLED, Reason.SOURCE_EVICTED
        else:
            outcome, reason = Outcome.REPREFILLED, Reason.NOTHING_TO_REUSE
        results = tuple(
            DirectiveResult(index, directive.mode, _directive_reason(directive.mode, reason))
            for index, directive in enumerate(payload.directives)
        )
        detail = refusal.detail if refusal else ""
        return replace(admission, outcome=outcome, reason=reason, detail=detail, directives=results)


def _refused(request: _Request, reason: Reason, detail: str) -> _Request:
    return replace(request, edit=None, refusal=EditRefusedError(reason, detail))


def _reached(forgot: ForgetCounts | None) -> bool:
    return forgot is not None and forgot != ForgetCounts()


def _directive_reason(mode: Mode, reason: Reason) -> Reason:
    """A forget is obeyed by prefilling, also where the turn's other edits were spliced."""
    return Reason.REPREFILLED if (mode, reason) == (Mode.FORGET, Reason.SPLICED) else reason


def _join(prefix: _Prefix, slots: Slots) -> Slots:
    return np.concatenate([prefix.match.slots, slots])


def _extend_lineage(
    runs: tuple[LineageRun, ...], carried: Carried | None
) -> tuple[LineageRun, ...]:
    """The lineage map after a splice: private from the first spliced position on."""
    if carried is None or (runs and runs[-1].lineage == carried.lineage):
        return runs
    return (*runs, LineageRun(carried.start, carried.lineage))
