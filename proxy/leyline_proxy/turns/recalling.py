"""Evicted texts: kept when a policy evicts them, and put back when a model or a caller asks."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from uuid import uuid4

import msgspec
import structlog

from leyline_policies.recall import Evicted, address_of

from ..apis.recall_calls import RecallAsked, ToolCall
from ..edits.asides import MARK, references_in
from ..edits.materialised import Shelf
from ..model.asides import Aside, NotRecalled, RecallCall, RecalledTexts, anchor_of, tokens_in
from ..model.messages import text_of
from ..model.parts import FoundParts, PartFacts, StoredPart
from ..model.session import Session
from ..model.working_set import PieceReport
from ..parts.limits import MAX_PARTS, Owner, PartStoreError
from ..parts.recallable_parts import RecallableParts
from ..plan.forgetting import forgotten_texts
from ..plan.plan_input import PlanInput
from ..plan.planning import Planned
from ..request.identify import Identity
from ..request.parse import ChatRequest
from ..request.recall_tool import address_in, fit_arguments, recalls
from ..request.side_bodies import RecallBody
from .recall_reports import report_of
from .turn import Turn

log = structlog.get_logger("leyline.recall")

_RENEW_S = 300.0
"""Time after which a text that is still evicted is put again."""
_MAX_KEPT = 4096
"""Sessions for which it is known what was put; others put all again."""

MAX_REFERENCES = 1024
"""Addresses that the references of one request are looked up by: those of the latest messages."""

_SPARED = 8
"""The part of the model's window that recalled texts leave to answers: one eighth."""

_TOKENS_PER_ESTIMATE = 2
"""Tokens that a text may have for each that is estimated: listings and code have that many."""

_State = tuple[float, int, bool]

ADDRESS_LENGTH = len("sha256:") + 32
"""Length of a whole address; a longer one has the digits that follow, too."""


@dataclass(slots=True)
class RecallBudget:
    """The rest of what one request may put back, over all its turns."""

    calls: int
    tokens: int
    seen: set[str] = field(default_factory=set)
    """Addresses that were put back already."""


class Recalls:
    """Keeps evicted texts, and finds them again. Trouble with the store never fails a turn.

    Args:
        parts: None if nothing is kept.
        calls: recalls by the model in one request.
        tokens: approximate tokens that they put back.
    """

    def __init__(self, parts: RecallableParts | None, *, calls: int, tokens: int) -> None:
        self._parts = parts
        self._calls = calls
        self._tokens = tokens
        self._kept: OrderedDict[Owner, tuple[_State, dict[str, float]]] = OrderedDict()
        """When each text was put, by owner: of a session's creation, demands and name."""
        self._barred: OrderedDict[Owner, tuple[float, set[str]]] = OrderedDict()
        """Addresses that were barred, by owner: of a session's creation."""

    def budget(self) -> RecallBudget:
        """Return the budget of a new request."""
        return RecallBudget(self._calls, self._tokens)

    async def texts_for(self, request: ChatRequest, identity: Identity) -> RecalledTexts | None:
        """Return the texts that a request's references and its session's asides need; None if
        nothing is put back."""
        if not recalls(request):
            return None
        session = identity.session
        asides = session.asides if session is not None else ()
        refers = MARK.search(request.raw) is not None
        if not (asides or refers):
            return None
        named = dict.fromkeys(each for aside in asides for each in aside.addresses)
        latest = dict.fromkeys(references_in(reversed(request.messages))) if refers else {}
        wanted = {**named, **dict.fromkeys(islice(latest, MAX_REFERENCES))}
        told = await self.look_up(holder_of(request, identity), wanted)
        lost: dict[str, NotRecalled] = {each: "limit" for each in latest if each not in wanted}
        return replace(told, causes={**told.causes, **lost}, limit_tokens=self._tokens)

    async def shelf_for(self, request: ChatRequest, identity: Identity) -> Shelf | None:
        """Return the state of the store for a request's working set; None if it names none."""
        option = request.options.context
        if option is None:
            return None
        shelf = Shelf(option, self._tokens, recall=recalls(request))
        if not shelf.recall or self._parts is None:
            return shelf
        holder, named = holder_of(request, identity), [*option.need, *option.exclude]
        addresses = {each[:ADDRESS_LENGTH].lower() for each in named if address_in(each.lower())}
        try:
            listed = await self._parts.listed(holder.owner, demands=holder.demands)
            found = await self._parts.get(holder.owner, addresses, demands=holder.demands)
            barred = await self._parts.barred(holder.owner, demands=holder.demands)
        except PartStoreError as error:
            log.warning("parts_unavailable", error=type(error).__name__)
            return replace(shelf, problem="store_down")
        known = {each.address for each in listed}
        # Only the newest are listed.
        older = [part.facts for part in found.parts.values() if part.address not in known]
        parts = tuple(filter(holder.may_read, (*older, *listed)))
        every = {address_of(text_of(each)) for each in request.messages if barred.everything}
        gone = found.forgotten | barred.addresses | every
        forgotten = frozenset(filter(holder.may_have, gone))
        return replace(shelf, parts=parts, forgotten=forgotten)

    async def look_up(self, holder: Holder, named: Iterable[str]) -> RecalledTexts:
        """Return the texts of addresses, which may lack their last digits."""
        whole, causes, found = await self._found(holder, list(dict.fromkeys(named)))
        return _texts(whole, causes, found, holder)

    async def recall(
        self, holder: Holder, body: RecallBody
    ) -> list[tuple[PieceReport, StoredPart | None]]:
        """Return a report on each address, with its part if the session has it."""
        wanted = list(dict.fromkeys(body.addresses))
        whole, causes, found = await self._found(holder, wanted)
        told = _texts(whole, causes, found, holder)
        budget = RecallBudget(len(wanted), body.budget_tokens or 0)
        if body.budget_tokens is None:
            budget.tokens = sum(map(tokens_in, told.texts.values()))
        reports: list[tuple[PieceReport, StoredPart | None]] = []
        for number, written in enumerate(wanted):
            judged = _judged(ToolCall("", "", number), written, told, budget)
            report = report_of(judged, f"addresses[{number}]")
            part = found.parts.get(whole.get(written, ""))
            address = part.address if part is not None else None
            reports.append((msgspec.structs.replace(report, address=address), part))
        return reports

    async def listed(self, holder: Holder) -> Sequence[PartFacts]:
        """Return what a session has in the store, oldest first.

        Raises:
            PartStoreError: it can't be read.
        """
        if self._parts is None:
            return ()
        found = await self._parts.listed(holder.owner, demands=holder.demands)
        return [*filter(holder.may_read, found)]

    async def _found(
        self, holder: Holder, wanted: Sequence[str]
    ) -> tuple[dict[str, str], dict[str, NotRecalled], FoundParts]:
        """Return whole addresses by those that are wanted, reasons for others, and the parts."""
        if not wanted or self._parts is None:
            return {}, dict.fromkeys(wanted, "unknown"), FoundParts()
        try:
            whole, causes = await self._whole(holder, wanted)
            addresses = set(whole.values())
            found = await self._parts.get(holder.owner, addresses, demands=holder.demands)
        except PartStoreError as error:
            log.warning("parts_unavailable", error=type(error).__name__)
            return {}, dict.fromkeys(wanted, "store_down"), FoundParts()
        readable = {at: each for at, each in found.parts.items() if holder.may_read(each)}
        found = replace(found, parts=readable)
        if self._parts.problem is not None:
            # What failed to come in isn't unknown.
            lost = [written for written, each in whole.items() if each not in found.parts]
            causes |= dict.fromkeys(lost, "store_down")
        return whole, causes, found

    async def _whole(
        self, holder: Holder, wanted: Sequence[str]
    ) -> tuple[dict[str, str], dict[str, NotRecalled]]:
        """Return the whole address of each one as written, and the reasons for the others."""
        whole = {each: each[:ADDRESS_LENGTH] for each in wanted if len(each) >= ADDRESS_LENGTH}
        causes: dict[str, NotRecalled] = {}
        short = [each for each in wanted if each not in whole]
        known = {each.address for each in await self.listed(holder)} if short else set()
        for each in short:
            fits = [address for address in known if address.startswith(each)]
            if len(fits) == 1:
                whole[each] = fits[0]
            else:
                causes[each] = "ambiguous" if fits else "unknown"
        return whole, causes

    async def bar(self, given: PlanInput, planned: Planned, session_id: str) -> bool:
        """Refuse for good what a turn forgets; return True if any of it is new here."""
        found = forgotten_texts(planned.prepared, planned.names, given.session)
        if self._parts is None or found == frozenset():
            return False
        owner, session = (given.request.tenant.name, session_id), given.session
        demands = session.demands if session is not None else 0
        known = self._barred_of(owner, session)
        texts = {} if found is None else {address_of(text): text for text in found}
        new = texts.keys() - known
        if found is not None and not new:
            return False
        barred = None if found is None else frozenset(texts[address] for address in new)
        await self._parts.bar(owner, barred, demands=demands)
        if len(known) > MAX_PARTS:
            known.clear()  # the store knows them, and takes them again
        known.update(new)
        return True

    def _barred_of(self, owner: Owner, session: Session | None) -> set[str]:
        """Return the addresses that a session is known to have barred, as far as is remembered."""
        created = session.created if session is not None else 0.0
        known = self._barred.pop(owner, None)
        found = known if known is not None and known[0] == created else (created, set())
        self._barred[owner] = found
        if len(self._barred) > _MAX_KEPT:
            self._barred.popitem(last=False)
        return found[1]

    async def keep(self, given: PlanInput, planned: Planned, session_id: str) -> None:
        """Keep the texts that a turn's policies evicted, in front of its way to the engine."""
        evicted, tenant = planned.prepared.evicted, given.request.tenant
        if self._parts is None or not evicted or not tenant.recall:
            return
        now, owner = time.time(), (tenant.name, session_id)
        parts = [_part(each, given, planned, now) for each in evicted]
        known = self._put_of(owner, given, parts[0])
        new = [part for part in parts if known.get(part.address, 0.0) + _RENEW_S < now]
        try:
            if new:
                await self._parts.put(owner, new)
                known.update((part.address, now) for part in new)
                for oldest in [*known][:-MAX_PARTS]:
                    del known[oldest]  # the store has no more of a session
        except PartStoreError as error:
            log.warning("parts_not_kept", error=type(error).__name__, texts=len(new))

    def _put_of(self, owner: Owner, given: PlanInput, part: PartFacts) -> dict[str, float]:
        """Return when texts of a session were put, since its last forget or change of name."""
        created = given.session.created if given.session is not None else 0.0
        state = created, part.level, part.certain
        known = self._kept.pop(owner, None)
        found = known if known is not None and known[0] == state else (state, {})
        self._kept[owner] = found
        if len(self._kept) > _MAX_KEPT:
            self._kept.popitem(last=False)
        return found[1]

    async def answered(self, turn: Turn, asked: RecallAsked, budget: RecallBudget) -> Aside:
        """Return the aside that answers a model's calls, within a request's budget."""
        written = {call.place: address_in(call.arguments) for call in asked.calls}
        holder = holder_of(turn.request, turn.identity)
        holder = holder.showing(each.address for each in turn.planned.prepared.evicted)
        told = await self.look_up(holder, filter(None, written.values()))
        served, prompt = turn.status.capability, turn.planned.rendered
        if served is not None and prompt is not None:
            left = room_for(budget.tokens, window=served.max_context, prompt=len(prompt.tokens))
            budget.tokens = left
        prints = turn.planned.prepared.client_fingerprints
        return Aside(
            anchor_of(prints, len(prints) - 1),
            tuple(_judged(call, written[call.place], told, budget) for call in asked.calls),
            asked.text,
            asked.reasoning,
            asked.own,
        )


@dataclass(frozen=True, slots=True)
class Holder:
    """A session, as far as its evicted texts are concerned."""

    owner: Owner
    demands: int = 0
    """See ``Session.demands``."""
    shown: frozenset[str] | None = None
    """Addresses of texts that may be put back; None for all.

    Anyone who sends the same messages finds a session without a name, so nothing may be put back
    there that the messages don't show."""

    def may_have(self, address: str) -> bool:
        """Return True if the caller may learn of a text."""
        return self.shown is None or address in self.shown

    def may_read(self, facts: PartFacts) -> bool:
        """Return True if a text may be put back."""
        return facts.certain if self.shown is None else facts.address in self.shown

    def showing(self, addresses: Iterable[str]) -> Holder:
        """Return the same session with more texts that its messages show."""
        return self if self.shown is None else replace(self, shown=self.shown.union(addresses))


def holder_of(request: ChatRequest, identity: Identity) -> Holder:
    """Return the session of a request."""
    session = identity.session
    shown = None
    if identity.trust == "messages":
        shown = frozenset(address_of(text_of(message)) for message in request.messages)
    demands = session.demands if session is not None else 0
    return Holder((request.tenant.name, identity.session_id), demands, shown)


def _texts(
    whole: Mapping[str, str], causes: dict[str, NotRecalled], found: FoundParts, holder: Holder
) -> RecalledTexts:
    texts: dict[str, str] = {}
    policies: dict[str, str] = {}
    for written, address in whole.items():
        part = found.parts.get(address)
        if not holder.may_have(address):
            causes[written] = "unknown"
        elif part is not None:
            texts[address] = part.text
            policies[address] = part.policy
        elif address in found.forgotten:
            causes[written] = "forgotten"
        else:
            causes.setdefault(written, "unknown")
    longer = {written: address for written, address in whole.items() if written != address}
    return RecalledTexts(texts, longer, causes, policies)


def _part(evicted: Evicted, given: PlanInput, planned: Planned, now: float) -> StoredPart:
    return StoredPart(
        address=evicted.address,
        role=evicted.role,
        tool=evicted.tool,
        tokens=evicted.tokens,
        tags=evicted.tags,
        policy=evicted.policy,
        turn=given.turn,
        index=given.index,
        demands=given.session.demands if given.session is not None else 0,
        forgets=planned.plan.forgets,
        created=now,
        sources=evicted.sources,
        certain=given.rules.trust != "messages",
        text=evicted.text,
    )


def _judged(
    call: ToolCall, written: str | None, told: RecalledTexts, budget: RecallBudget
) -> RecallCall:
    """Return a call with its result, and take it from the budget."""
    called = call.id or f"call_{uuid4().hex[:24]}"
    answer = RecallCall(called, fit_arguments(call.arguments), call.place)
    address = told.whole.get(written, written) if written is not None else None
    text = told.texts.get(address) if address is not None else None
    cause: NotRecalled | None = None
    tokens = tokens_in(text) if text is not None else 0
    if budget.calls <= 0:
        cause = "limit"
    elif written is None or address is None:
        cause = "malformed"
    elif text is None:
        cause = told.causes.get(written, "unknown")
    elif address in budget.seen:
        cause = "repeated"
    elif tokens > budget.tokens:
        cause = "over_budget"
    budget.calls -= 1
    if cause is not None:
        return replace(answer, cause=cause, tokens=tokens)
    budget.tokens -= tokens
    budget.seen.add(str(address))
    policy = told.policies.get(str(address), "")
    return replace(answer, address=str(address), tokens=tokens, policy=policy)


def room_for(wanted: int, *, window: int, prompt: int) -> int:
    """Return the approximate tokens, of those wanted, that fit into a model's window.

    A prompt beyond the window would be refused, on this turn and all later ones.

    Args:
        prompt: tokens of the turn's prompt.
    """
    left = window - prompt - window // _SPARED
    return min(wanted, max(0, left) // _TOKENS_PER_ESTIMATE)
