"""Admission: match, check the edit, plan, take slots, splice. All or nothing.

A splice is applied once, here; while it runs, the prefix and every source are locked. On any error
slots and locks are returned, and the request runs as an ordinary prefill.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from secrets import token_bytes

import numpy as np

from leyline_engine.admit.content_reuse import ContentReuse, reuse_counts
from leyline_engine.admit.edits import ResolvedEdit
from leyline_engine.admit.plan import Plan, plan_turn
from leyline_engine.admit.rules import (
    CheckedRequest,
    EditVerdict,
    Rules,
    extend_lineage,
    judge,
)
from leyline_engine.contract import (
    ATTENTION_SINK,
    CopySegment,
    EditPayload,
    ForgetCounts,
    LineageRun,
    Reason,
    Recompute,
    ReuseCounts,
    ReusePayload,
    SpanLabel,
)
from leyline_engine.records.ledger import Carried, Struck
from leyline_engine.records.lineage import SALT_BYTES, fold_keys, runs_before
from leyline_engine.records.sources import SourceTurn
from leyline_engine.reuse.fingerprints import MatcherKind
from leyline_replay.cache.manager import CacheManager
from leyline_replay.cache.radix import Match, Node
from leyline_replay.cache.slots import PoolExhaustedError, Slots

log = logging.getLogger(__name__)

_UNJUDGED = EditVerdict()


@dataclass(frozen=True, slots=True)
class Admission:
    """The start of a request: its slots, its locked prefix, its plan."""

    plan: Plan
    held: Slots
    """One slot per prompt position; the first ``plan.prefix`` are the tree's."""
    node: Node
    lineage: tuple[LineageRun, ...]
    verdict: EditVerdict = _UNJUDGED
    forgot: ForgetCounts | None = None
    carried: Carried | None = None
    """Readers that the splice hides; entered into the ledger when its KV is published."""
    spans: tuple[SpanLabel, ...] = ()
    """The prompt's labels; empty if they can't be relied on."""
    sources: tuple[SourceTurn, ...] = ()
    """Sources of the plan's copies, by index."""
    edited: tuple[CopySegment, ...] = ()
    """The edit's own copies, with those that the plan computes again."""
    reuse: ReuseCounts | None = None
    """The account of reuse; None if it wasn't asked for."""
    start: int | None = None
    """Slot of the tree's state after the prefix; None for that of a sequence's start."""
    states: Mapping[int, int] = field(default_factory=dict)
    """Slots of the states that were copied, by position; the request owns them."""


@dataclass(frozen=True, slots=True)
class _Lookup:
    """One way in which a prompt may be cached."""

    keys: array[int]
    limit: int
    """Number of its tokens that may be used."""
    lineage: tuple[LineageRun, ...]


@dataclass(frozen=True, slots=True)
class _Prefix:
    match: Match
    lineage: tuple[LineageRun, ...]
    keys: array[int]
    """Keys under which it was found."""
    native: int
    """Its last anchor."""


class Admitter:
    """Turns prompts and edit payloads into admissions against one cache.

    Args:
        struck: called with what each forget has struck, by its ticket, before slots are counted.
        salt: see :func:`~leyline_engine.records.lineage.derive_lineage`; by default it is drawn.
        matcher: the choice of fingerprints by which content is found.
        recompute: tokens after edits that aren't copied.
    """

    def __init__(
        self,
        cache: CacheManager,
        *,
        splices: bool,
        struck: Callable[[str, Struck], None],
        salt: bytes | None = None,
        matcher: MatcherKind = MatcherKind.WINNOW,
        recompute: Recompute = Recompute(),  # noqa: B008 - immutable
    ) -> None:
        self._cache = cache
        self._struck = struck
        salt = token_bytes(SALT_BYTES) if salt is None else salt
        self._rules = Rules(
            cache.registry,
            cache.ledger,
            splices=splices,
            salt=salt,
            recompute=recompute,
            recurrent=cache.anchors.states is not None,
        )
        self._reuse = ContentReuse(
            cache.registry,
            cache.ledger,
            cache.capacity,
            salt=salt,
            matcher=matcher,
            lay=partial(plan_turn, page=cache.page_tokens),
        )
        cache.reuse = self._reuse.index

    def admit(
        self,
        message_id: str,
        prompt: array[int],
        payload: EditPayload | None,
        forgot: ForgetCounts | None = None,
        reuse: ReusePayload | None = None,
        *,
        reuses: bool = True,
    ) -> Admission:
        """Admit one request.

        Args:
            forgot: result of an earlier :meth:`forget` for it.
            reuse: the request for reuse, if any.
            reuses: False admits a request for reuse without it.

        Raises:
            PoolExhaustedError: no room for the prompt now; nothing was taken.
        """
        request = self._rules.check(prompt, payload, reuse=reuse)
        try:
            request, admission = self._with_reuse(message_id, request, reuses=reuses)
        except PoolExhaustedError:
            if request.edit is None:
                raise
            request = request.refused(
                Reason.SOURCE_EVICTED, "no slots for the copies beside their locked sources"
            )
            admission = self._place(message_id, request, self._match_prefix(request))
        except Exception:
            if request.edit is None:
                raise
            log.exception("splice failed; the request runs as an ordinary prefill")
            request = request.refused(Reason.TRANSFORM_FAILED, "the splice failed in the engine")
            exact = self._match(_Lookup(fold_keys(prompt), len(prompt) - 1, ()))
            admission = self._place(message_id, request, exact)
        if payload is not None and request.forgets:
            # After the copies: they may use positions before the forgotten span.
            admission = self._forget_behind(message_id, request, payload, admission, forgot)
        return replace(
            admission,
            verdict=judge(request, admission.plan, admission.forgot),
            spans=request.spans,
            reuse=reuse_counts(request, admission.plan),
        )

    def retained(self, source: SourceTurn) -> None:
        """Record that a turn was retained: its content may be reused."""
        self._reuse.retained(source, lambda: self._cache.tree.peek(source.keys()))

    def computed(self, scope: str, prompt: Callable[[], SourceTurn]) -> SourceTurn | None:
        """Record that a running turn's prompt is cached; see :meth:`ContentReuse.computed`."""
        return self._reuse.computed(
            scope, prompt, lambda source: self._cache.tree.peek(source.keys())
        )

    def ended(self, prompt: SourceTurn) -> None:
        """Record that a turn ended; see :meth:`ContentReuse.ended`."""
        self._reuse.ended(prompt)

    def _with_reuse(
        self, message_id: str, request: CheckedRequest, *, reuses: bool
    ) -> tuple[CheckedRequest, Admission]:
        """Admit a request with what is found elsewhere of its content, or without if that fails."""
        if reuses:
            prefix = self._match_prefix(request)
            found = self._reuse.search(request, prefix.native, self._available)
            try:
                return found, self._place(message_id, found, prefix)
            except Exception as error:
                if found.edit is request.edit:
                    raise
                if not isinstance(error, PoolExhaustedError):
                    log.exception("reuse failed; the request runs without it")
        request = request.without_reuse()
        return request, self._place(message_id, request, self._match_prefix(request))

    def _available(self, source: SourceTurn) -> int:
        return len(self._cache.tree.peek(source.keys()))

    def cached(self, prompt: array[int], payload: EditPayload | None) -> Slots:
        """Return the slots of a request's cached prefix; nothing is split or touched."""
        lookup = self._longest(self._rules.check(prompt, payload))
        return self._cache.peek(lookup.keys, lookup.limit)

    def forget(
        self,
        message_id: str,
        prompt: array[int],
        payload: EditPayload,
        forgot: ForgetCounts | None = None,
    ) -> ForgetCounts:
        """Forget what a request demands though it isn't admitted, or not yet.

        Args:
            forgot: result of an earlier call for it.
        """
        request = self._rules.check(prompt, payload)
        lookup = self._longest(request)
        found = lookup.keys[: len(self._cache.peek(lookup.keys, lookup.limit))]
        return self._forget(message_id, request, payload, found, forgot)

    def _forget(
        self,
        message_id: str,
        request: CheckedRequest,
        payload: EditPayload,
        found: array[int],
        before: ForgetCounts | None = None,
    ) -> ForgetCounts:
        session, witness = (payload.scope, payload.session), self._cache.witness
        # The prompt's cached prefix is clean: it ends before the forgotten spans' first reader.
        spared = (fold_keys(request.prompt), found)
        witness.forgetting(message_id, session, request.forgotten, spared)
        counts = self._cache.forget(
            session,
            request.forgotten,
            spared=spared,
            ticket=message_id,
            before=before,
            struck=partial(self._struck, message_id),
        )
        witness.forgot(message_id, counts)
        return counts

    def _forget_behind(
        self,
        message_id: str,
        request: CheckedRequest,
        payload: EditPayload,
        admission: Admission,
        before: ForgetCounts | None,
    ) -> Admission:
        keys = fold_keys(request.prompt, admission.lineage, payload.scope)
        found = keys[: admission.plan.prefix]
        try:
            counts = self._forget(message_id, request, payload, found, before)
        except BaseException:
            self.give_back(admission)
            raise
        return replace(admission, forgot=counts)

    def give_back(self, admission: Admission) -> None:
        """Undo an admission: nothing of it runs."""
        self._cache.release(admission.held[admission.plan.prefix :])
        self._cache.release_states(admission.states.values())
        self._cache.unlock(admission.node)

    def _match(self, lookup: _Lookup) -> _Prefix:
        match = self._cache.match(lookup.keys, lookup.limit)
        native = self._cache.native(lookup.keys, lookup.limit)
        return _Prefix(match, runs_before(lookup.lineage, match.length), lookup.keys, native)

    def _match_prefix(self, request: CheckedRequest) -> _Prefix:
        """Return the longest cached prefix; exact KV is preferred to spliced KV of equal length."""
        found = [self._match(lookup) for lookup in self._lookups(request)]
        return max(found, key=lambda each: (each.native, each.match.length))

    def _lookups(self, request: CheckedRequest) -> Iterator[_Lookup]:
        yield _Lookup(fold_keys(request.prompt), len(request.prompt) - 1, ())
        scope = request.payload.scope if request.payload is not None else ""
        for lineage in self._rules.maps(request):
            keys = fold_keys(request.prompt, lineage, scope)
            yield _Lookup(keys, self._rules.clean_length(request, lineage), lineage)

    def _longest(self, request: CheckedRequest) -> _Lookup:
        """Return the lookup that :meth:`_match_prefix` would choose."""
        peek = self._cache.peek
        return max(self._lookups(request), key=lambda found: len(peek(found.keys, found.limit)))

    def _place(self, message_id: str, request: CheckedRequest, prefix: _Prefix) -> Admission:
        self._cache.lock(prefix.match.node)
        try:
            self._cache.listener.matched(message_id, prefix.match.slots[: prefix.native])
            if request.edit is not None:
                return self._splice(message_id, request, prefix, request.edit)
            plan = plan_turn(len(request.prompt), prefix.native, (), (), sink=0)
            return self._begin(message_id, prefix, plan)
        finally:
            self._cache.unlock(prefix.match.node)

    def _begin(self, message_id: str, prefix: _Prefix, plan: Plan) -> Admission:
        """Take slots for what a plan adds to its prefix, and lock that."""
        node = prefix.match.node
        if plan.prefix < prefix.match.length:
            node = self._cache.match(prefix.keys, plan.prefix).node
        self._cache.lock(node)
        try:
            slots = self._cache.allocate(plan.length - plan.prefix, message_id)
        except BaseException:
            self._cache.unlock(node)
            raise
        start, states = None, self._cache.anchors
        if states.states is not None and prefix.native == plan.prefix > 0:
            start = states.slot(prefix.keys, plan.prefix)
        held = np.concatenate([prefix.match.slots[: plan.prefix], slots])
        lineage = runs_before(prefix.lineage, plan.prefix)
        return Admission(plan, held, node, lineage, start=start)

    def _splice(
        self, message_id: str, request: CheckedRequest, prefix: _Prefix, edit: ResolvedEdit
    ) -> Admission:
        """Lock the sources, take slots, copy and rotate; on failure nothing remains."""
        keys = [source.keys() for source in edit.sources]
        sources = [self._cache.match(each) for each in keys]
        locked: list[Node] = []
        admission: Admission | None = None
        try:
            for source in sources:
                self._cache.lock(source.node)
                locked.append(source.node)
            plan = plan_turn(
                len(request.prompt),
                prefix.native,
                edit.copies,
                [source.length for source in sources],
                sink=max(edit.payload.sink, ATTENTION_SINK),
                kinds=edit.kinds,
                page=self._cache.page_tokens,
                state=self._cache.terms(keys, prefix.match.length),
            )
            admission = self._begin(message_id, prefix, plan)
            for copy in plan.copies:
                target = admission.held[copy.dest : copy.dest_end]
                origin = sources[copy.source].slots[copy.start : copy.end]
                self._cache.copy(origin, target, copy.dest)
            admission = replace(admission, states=self._copy_states(plan, keys, admission.start))
            carried = self._rules.carry(request, admission.lineage, plan)
            return replace(
                admission,
                lineage=extend_lineage(admission.lineage, carried),
                carried=carried,
                sources=edit.sources,
                edited=edit.own_copies,
            )
        except BaseException:
            if admission is not None:
                self.give_back(admission)
            raise
        finally:
            for node in locked:
                self._cache.unlock(node)

    def _copy_states(
        self, plan: Plan, keys: Sequence[array[int]], start: int | None
    ) -> dict[int, int]:
        """Copy the states of a plan; those inside of runs may lack a slot.

        Raises:
            PoolExhaustedError: there is no slot for one that a forward starts from.
        """
        anchors, copied = self._cache.anchors, dict[int, int]()
        if anchors.states is None:
            return copied
        needed = {step.start for step in plan.prefills}
        origins = {each: anchors.slot(keys[each.source], each.position) for each in plan.states}
        spared = {*origins.values(), *(() if start is None else (start,))}
        try:
            for each in sorted(plan.states, key=lambda each: each.dest not in needed):
                slot = anchors.take(spared)
                if slot is not None:
                    anchors.states.write(slot, anchors.states.read(origins[each]))
                    copied[each.dest] = slot
                elif each.dest in needed:
                    raise PoolExhaustedError("no slot for a state")
        except BaseException:
            self._cache.release_states(copied.values())
            raise
        return copied
