"""Both engines' decisions on a request before any KV moves: pure over registry and ledger.

An engine checks the request (:meth:`Rules.check`), looks its prompt up under the lineage maps under
which it may be cached (:meth:`Rules.maps`, :meth:`Rules.clean_length`), plans and executes, asks
for the spans that the copies hide (:meth:`Rules.carry`), and names the outcome (:func:`judge`).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, replace

from leyline_engine.admit.edits import (
    EditRefusedError,
    ResolvedEdit,
    carries_edit,
    check_lineage,
    check_spans,
    forgets,
    forgotten_spans,
    resolve_edit,
)
from leyline_engine.admit.plan import Plan
from leyline_engine.contract import (
    CopySegment,
    DirectiveResult,
    EditPayload,
    ForgetCounts,
    LineageRun,
    Mode,
    Outcome,
    Reason,
    Recompute,
    RecurrentEdits,
    ReusePayload,
    SpanLabel,
)
from leyline_engine.records.keys import shared_length
from leyline_engine.records.ledger import Carried, SpanKey, SpanLedger
from leyline_engine.records.lineage import (
    derive_lineage,
    first_spliced,
    lineage_bits,
    share_lineage,
)
from leyline_engine.records.sources import SourceRegistry
from leyline_engine.reuse.matching import Hits


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """A prompt with its payload, checked as far as possible."""

    prompt: array[int]
    payload: EditPayload | None
    edit: ResolvedEdit | None
    refusal: EditRefusedError | None
    spans: tuple[SpanLabel, ...]
    """The prompt's labels; empty if they can't be relied on."""
    forgotten: frozenset[SpanKey] | None
    """Forgotten spans; None if nothing is forgotten, or if the ledger doesn't know them."""
    reuse: ReusePayload | None = None
    """The request for reuse, if any."""
    hits: Hits | None = None
    """Content that was found elsewhere; None if it wasn't looked for."""
    recurrent: bool = False
    """True if the model has recurrent layers."""

    @property
    def forgets(self) -> bool:
        return forgets(self.payload)

    @property
    def copies_hits(self) -> bool:
        """True if it copies content that was found elsewhere."""
        return self.edit is not None and any(kind is not None for kind in self.edit.kinds)

    @property
    def only_reuses(self) -> bool:
        """True if it copies, and none of the copies is an edit's."""
        return self.edit is not None and not carries_edit(self.payload)

    def without_reuse(self) -> CheckedRequest:
        """Return the same request with nothing reused, as its receipt will report."""
        return replace(self, hits=None if self.reuse is None else Hits())

    def refused(self, reason: Reason, detail: str) -> CheckedRequest:
        """Return the same request as an ordinary prefill, with the reason."""
        refusal = EditRefusedError(reason, detail)
        return replace(self, edit=None, refusal=refusal, reuse=None, hits=None)


@dataclass(frozen=True, slots=True)
class EditVerdict:
    """The outcome of a request's edit."""

    outcome: Outcome = Outcome.UNEDITED
    reason: Reason | None = None
    detail: str = ""
    directives: tuple[DirectiveResult, ...] = ()


class Rules:
    """Decisions over one engine's registry and ledger.

    Args:
        splices: True if the engine can turn the keys of its model's pool.
        salt: see :func:`~.lineage.derive_lineage`; the same on all ranks of a replica.
        recurrent: True if the model has recurrent layers: it reuses nothing, and edits need the
            consent of :class:`~.contract.RecurrentEdits`.
    """

    def __init__(
        self,
        registry: SourceRegistry,
        ledger: SpanLedger,
        *,
        splices: bool,
        salt: bytes,
        recompute: Recompute = Recompute(),  # noqa: B008 - immutable
        recurrent: bool = False,
    ) -> None:
        self._registry = registry
        self._ledger = ledger
        self._splices = splices
        self._salt = salt
        self._recompute = recompute
        self._recurrent = recurrent

    def check(
        self,
        prompt: array[int],
        payload: EditPayload | None,
        refusal: EditRefusedError | None = None,
        reuse: ReusePayload | None = None,
    ) -> CheckedRequest:
        """Check a payload against the prompt and the engine's own record; refusals are noted.

        Args:
            reuse: the request for reuse; an engine that doesn't splice ignores it.
            refusal: reason of an earlier refusal of the edit; the rest of the payload holds.
        """
        edit: ResolvedEdit | None = None
        spans: tuple[SpanLabel, ...] = ()
        forgotten: frozenset[SpanKey] | None = None
        if payload is not None:
            try:
                check_spans(payload.spans, len(prompt))
                spans = payload.spans
                check_lineage(payload.lineage)
                if refusal is None and carries_edit(payload):
                    edit = self._resolve(payload, prompt)
            except EditRefusedError as error:
                refusal = refusal or error
            if edit is not None:
                forgotten = edit.forgotten
                if self._recurrent and _moves_states(edit.payload):
                    detail = "the model has recurrent layers, and edits are to be exact"
                    edit, refusal = None, EditRefusedError(Reason.RECURRENT_STATE, detail)
            elif forgets(payload):
                forgotten = forgotten_spans(payload, (), self._ledger)
        asked = reuse if self._splices and not self._recurrent else None
        return CheckedRequest(
            prompt, payload, edit, refusal, spans, forgotten, asked, recurrent=self._recurrent
        )

    def _resolve(self, payload: EditPayload, prompt: array[int]) -> ResolvedEdit:
        if not self._splices:
            raise EditRefusedError(Reason.UNSUPPORTED_RUNTIME, "this engine doesn't splice")
        return resolve_edit(payload, prompt, self._registry, self._ledger, self._recompute)

    def maps(self, request: CheckedRequest) -> Iterator[tuple[LineageRun, ...]]:
        """Yield lineage maps under which the prompt may be cached: its own, then shared ones."""
        payload = request.payload
        if payload is None or request.refusal is not None:
            return
        if payload.lineage:
            yield payload.lineage
        if payload.share:
            for start in self._ledger.shared_starts(payload.scope, payload.share):
                yield (LineageRun(start, share_lineage(payload.share, salt=self._salt)),)

    def clean_length(self, request: CheckedRequest, lineage: tuple[LineageRun, ...]) -> int:
        """Return how much of the prompt a lineage may serve: nothing that read a forgotten span."""
        limit = len(request.prompt) - 1
        payload = request.payload
        if payload is None or not request.forgets:
            return limit
        if request.forgotten is None:
            return first_spliced(lineage, limit)
        return self._ledger.hidden_reader(lineage, payload.scope, request.forgotten, limit)

    def carry(
        self, request: CheckedRequest, runs: tuple[LineageRun, ...], plan: Plan
    ) -> Carried | None:
        """Return the lineage that a plan's copies begin, and the readers that they bring along.

        Args:
            runs: lineage map of the plan's prefix.

        Returns:
            None if nothing is copied.
        """
        edit, prompt = request.edit, request.prompt
        if edit is None or not plan.copies:
            return None
        payload = edit.payload
        used = sorted({copy.source for copy in plan.copies})
        # What was reused has read other text than the scope has: it is nobody else's.
        foreign = self._is_foreign(edit, runs, plan)
        share = "" if foreign else payload.share
        name = share_lineage(share, salt=self._salt) or derive_lineage(
            runs[-1].lineage if runs else "",
            payload.scope,
            [
                (self._registry.seal(edit.sources[index]), edit.sources[index].lineage)
                for index in used
            ],
            plan.copies,
            salt=self._salt,
        )
        # Holders of these runs remember some from there on; a shared lineage has other parents.
        before = 0 if share else plan.copies[0].dest
        readers = self._new_readers(edit, prompt, runs, plan, before)
        continues = bool(runs) and runs[-1].lineage == name
        start = runs[-1].start if continues else plan.copies[0].dest
        groups = self._groups(request, runs, plan)
        self._note(edit, name, plan, shared=bool(share))
        return Carried(name, start, readers, share, foreign, groups)

    def carry_alone(
        self,
        request: CheckedRequest,
        runs: tuple[LineageRun, ...],
        plan: Plan,
        message_id: str,
        start: int,
    ) -> Carried | None:
        """Return the same under a lineage that only this request has.

        Args:
            runs: lineage map of the plan's prefix.
            start: position from which the keys are under the new lineage; ``runs`` govern those
                before it alone.
        """
        edit, prompt = request.edit, request.prompt
        if edit is None or not plan.copies:
            return None
        readers = self._new_readers(edit, prompt, runs, plan, start)
        name = self.fresh_lineage(message_id, edit.payload.scope)
        foreign = self._is_foreign(edit, runs, plan)
        self._note(edit, name, plan)
        return Carried(name, start, readers, "", foreign, self._groups(request, runs, plan))

    def _note(self, edit: ResolvedEdit, lineage: str, plan: Plan, *, shared: bool = False) -> None:
        session = (edit.payload.scope, edit.payload.session)
        bits = lineage_bits(lineage, edit.payload.scope)
        provenance = self._ledger.provenance
        provenance.note(session, bits, edit.sources, plan.copies, shared=shared)

    def _is_foreign(self, edit: ResolvedEdit, runs: tuple[LineageRun, ...], plan: Plan) -> bool:
        """Return True if a prefix or a plan's copies may have read what reuse brought along."""
        used = {copy.source for copy in plan.copies}
        maps = [runs, *(edit.sources[index].lineage for index in used)]
        scope = edit.payload.scope
        # If nothing is reused, all sources are the tenant's own.
        return plan.reused > 0 or any(self._ledger.is_foreign(scope, map_) for map_ in maps)

    def _groups(
        self, request: CheckedRequest, runs: tuple[LineageRun, ...], plan: Plan
    ) -> frozenset[str]:
        """Return the groups in which all was sent that a plan's KV will have read.

        There are none if it copies for an edit, and so has read what its prompt lacks.
        """
        if request.edit is None or request.reuse is None or plan.spliced:
            return frozenset()
        groups = self._ledger.groups_of(
            request.edit.payload.scope, runs, frozenset(request.reuse.groups)
        )
        for index in {copy.source for copy in plan.copies}:
            source = request.edit.sources[index]
            groups = self._ledger.groups_of(source.scope, source.lineage, groups & source.groups)
        return groups

    def _new_readers(
        self,
        edit: ResolvedEdit,
        prompt: array[int],
        runs: tuple[LineageRun, ...],
        plan: Plan,
        before: int,
    ) -> dict[SpanKey, int]:
        """Return what a plan's copies have read, less what ``runs`` remember before a position."""
        shared = [shared_length(source.tokens, prompt) for source in edit.sources]
        readers = self._ledger.carry(edit.sources, plan.copies, shared)
        known = self._ledger.remembered(runs, edit.payload.scope, before) if before else ()
        return {span: at for span, at in readers.items() if span not in known}

    def fresh_lineage(self, message_id: str, scope: str) -> str:
        """Return the name of a lineage that only this request has."""
        return derive_lineage(message_id, scope, (), (), salt=self._salt)


def _moves_states(payload: EditPayload) -> bool:
    """Return True if an edit needs kept states, and its tenant hasn't asked for them; one that only
    forgets needs none."""
    amortizes = any(directive.mode is not Mode.FORGET for directive in payload.directives)
    copies = (each for each in payload.segments if isinstance(each, CopySegment))
    moves = amortizes or any(copy.start != copy.dest for copy in copies)
    return moves and payload.recurrent is not RecurrentEdits.KEPT


def extend_lineage(runs: tuple[LineageRun, ...], carried: Carried | None) -> tuple[LineageRun, ...]:
    """Return the lineage map after a splice: private from the first spliced position on."""
    if carried is None or (runs and runs[-1].lineage == carried.lineage):
        return runs
    return (*runs, LineageRun(carried.start, carried.lineage))


def judge(request: CheckedRequest, plan: Plan, forgot: ForgetCounts | None) -> EditVerdict:
    """Name the outcome of a request's edit."""
    payload, refusal = request.payload, request.refusal
    reached = forgot is not None and forgot != ForgetCounts()
    if payload is None or not (carries_edit(payload) or refusal or reached):
        return EditVerdict()
    if refusal is not None:
        outcome, reason = Outcome.REPREFILLED, refusal.reason
    elif plan.spliced:
        outcome, reason = Outcome.SPLICED, Reason.SPLICED
    elif forgot is not None:
        outcome, reason = Outcome.REPREFILLED, Reason.REPREFILLED
    elif plan.evicted:
        outcome, reason = Outcome.REPREFILLED, Reason.SOURCE_EVICTED
    else:
        outcome, reason = Outcome.REPREFILLED, Reason.NOTHING_TO_REUSE
    results = tuple(
        DirectiveResult(index, directive.mode, _directive_reason(directive.mode, reason))
        for index, directive in enumerate(payload.directives)
    )
    return EditVerdict(outcome, reason, refusal.detail if refusal else "", results)


def _directive_reason(mode: Mode, reason: Reason) -> Reason:
    """Return a forget's reason: prefilled, also if the turn's other edits were spliced."""
    return Reason.REPREFILLED if (mode, reason) == (Mode.FORGET, Reason.SPLICED) else reason
