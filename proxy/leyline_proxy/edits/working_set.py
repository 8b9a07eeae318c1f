"""The plan for a request's working set, and its final reports. Pure.

Needed pieces are considered in the order of ``need``; a tag or a tool stands for its pieces, newest
first. The first rule that applies decides:

1. A message with the text is sent whole: the piece is in the prompt, and costs nothing.
2. A message with the text is in quarantine or to be forgotten, or a forget removed the text before:
   refused, whatever else holds.
3. The request excludes it: refused. ``exclude`` is stronger than a tag or a tool in ``need``. An
   address in ``need`` is stronger than a tag or a tool in ``exclude``; the address in both is
   excluded.
4. The tenant has no recall: refused.
5. The store can't be read: nobody knows what was forgotten, so nothing comes back.
6. It is larger than the rest of the budget: it stays out, and later, smaller ones may still fit.
7. A policy evicted it from the client's list: it is restored in its place. Else it is in the store:
   it is appended.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import msgspec

from leyline_engine.contract import uncovered
from leyline_policies.conversation import INSTRUCTION_ROLES

from ..model.parts import PartFacts
from ..model.working_set import (
    MAX_PIECES,
    ContextPiece,
    Extent,
    PieceCatalogue,
    PieceCause,
    PieceReport,
    PieceVerdict,
    Selector,
    Treatment,
    WorkingSet,
    joined_extents,
)
from ..request.working_set import ContextOption
from .piece_index import Key, PieceIndex

HIT_PERCENT = 90
"""Smallest share of a piece's tokens, in percent, that the cache serves for a hit."""


def plan_working_set(
    option: ContextOption, catalogue: PieceCatalogue, *, recall: bool, limit_tokens: int
) -> WorkingSet:
    """Return the changes that a request's working set makes to the turn's messages.

    Args:
        option: a checked option.
        recall: False if the tenant has no recall.
        limit_tokens: the proxy's limit for what one request brings back.
    """
    index = PieceIndex(catalogue, recall=recall)
    exclusions = _Exclusions(option, catalogue, index)
    asked = option.budget_tokens
    budget = limit_tokens if asked is None else min(asked, limit_tokens)
    draft = _Draft(index, exclusions, catalogue, recall, limit_tokens, budget)
    for number, selector in enumerate(option.needed):
        draft.need(f"need[{number}]", selector)
    return WorkingSet(
        restore=tuple(sorted(draft.restore)),
        append=tuple(draft.append),
        evict=tuple(sorted(exclusions.evict)),
        reports=tuple(draft.reports),
        refusals=tuple(islice(exclusions.refusals(), MAX_PIECES)),
        spent_tokens=draft.spent,
        budget_tokens=budget,
    )


def settled(
    planned: WorkingSet,
    messages: Mapping[int, Extent],
    appended: Mapping[str, Extent],
    served: Iterable[Extent],
) -> tuple[PieceReport, ...]:
    """Return the final reports on the needed pieces.

    A piece in the prompt is a HIT if the cache served at least :data:`HIT_PERCENT` percent of its
    tokens, whether as prefix, spliced or reused. Else it is a FAULT if its text came from the
    store, and a RECOMPUTE if it is in the client's list. A piece with an unknown place is no HIT.

    Args:
        messages: places in the prompt by index in the client's list.
        appended: places in the prompt by address of the appended part.
        served: extents of the prompt that the cache served; they may overlap.
    """
    cached = joined_extents(served)
    return tuple(_settled(report, messages, appended, cached) for report in planned.reports)


def _settled(
    report: PieceReport,
    messages: Mapping[int, Extent],
    appended: Mapping[str, Extent],
    cached: Sequence[Extent],
) -> PieceReport:
    if report.cause is not None:
        return report
    from_store = not report.messages
    made = PieceVerdict.FAULT if from_store else PieceVerdict.RECOMPUTE
    if from_store:
        places = [appended.get(report.address or "")]
    else:
        places = [messages.get(index) for index in report.messages]
    known = joined_extents(place for place in places if place is not None)
    if len(places) != sum(place is not None for place in places):
        return msgspec.structs.replace(report, verdict=made, price_tokens=report.tokens)
    tokens = sum(end - start for start, end in known)
    computed = sum(end - start for place in known for start, end in uncovered(place, cached))
    is_hit = 100 * (tokens - computed) >= HIT_PERCENT * tokens
    return msgspec.structs.replace(
        report,
        verdict=PieceVerdict.HIT if is_hit else made,
        tokens=tokens,
        price_tokens=computed,
    )


class _Exclusions:
    """The pieces that a request excludes, and the messages that leave."""

    def __init__(self, option: ContextOption, catalogue: PieceCatalogue, index: PieceIndex) -> None:
        self._selectors = option.excluded
        self._names = {(each.kind, each.value) for each in self._selectors}
        self._index = index
        self._lost = PieceCause.UNKNOWN if catalogue.problem is None else PieceCause.STORE_DOWN
        self._addresses = set(_addressed(self._selectors, index))
        self._needed = set(_addressed(option.needed, index))
        self._pieces = {index.key_of_address(each) for each in self._needed}
        self._protected = _protected(catalogue.messages)
        named = [each for each in catalogue.messages if self._concerns(each)]
        self._kept = [each for each in named if each.client_index in self._protected]
        self.evict = {
            each.client_index
            for each in named
            if each.treatment is Treatment.WHOLE
            and each.address is not None
            and each.client_index not in self._protected
        }

    def has(self, key: Key) -> bool:
        """Return True if a piece, or one of its messages, is excluded."""
        facts = self._index.parts.get(key) if isinstance(key, str) else None
        every = (*self._index.messages(key), *(() if facts is None else (facts,)))
        return key in self._addresses or any(map(self._concerns, every))

    def refusals(self) -> Iterator[PieceReport]:
        """Yield a report on each exclusion without effect.

        A tag or tool that nothing has is no mistake: it may exclude later messages.
        """
        kept = self._kept_by_selector()
        for number, selector in enumerate(self._selectors):
            name = f"exclude[{number}]"
            found = self._index.addressed(selector.value) if selector.kind == "address" else None
            if found is not None and len(found) != 1:
                yield _abstention(name, PieceCause.AMBIGUOUS if found else self._lost)
            for message in kept.get(number, ()):
                yield _report(
                    name,
                    PieceVerdict.REFUSE,
                    message.address,
                    cause=self._protected[message.client_index],
                    messages=(message.client_index,),
                    tokens=message.tokens,
                )

    def _kept_by_selector(self) -> Mapping[int, list[ContextPiece]]:
        """Return the excluded messages that stay, by the first selector that names each."""
        numbers: dict[tuple[str, str], int] = {}
        for number, selector in enumerate(self._selectors):
            values = [selector.value]
            if selector.kind == "address":
                values = [*_addressed([selector], self._index)]
            for value in values:
                numbers.setdefault((selector.kind, value), number)
        kept: dict[int, list[ContextPiece]] = defaultdict(list)
        for message in self._kept:
            names = [("tool", message.tool), *(("tag", tag) for tag in message.tags)]
            names.append(("address", message.address or ""))
            first = min((numbers[name] for name in names if name in numbers), default=None)
            if first is not None:
                kept[first].append(message)
        return kept

    def _concerns(self, facts: ContextPiece | PartFacts) -> bool:
        if facts.address in self._addresses:
            return True
        tags = (("tag", tag) for tag in facts.tags)
        if ("tool", facts.tool) not in self._names and self._names.isdisjoint(tags):
            return False
        part = facts.part if isinstance(facts, ContextPiece) else facts.address
        return facts.address not in self._needed and part not in self._pieces


@dataclass(slots=True)
class _Draft:
    """A working set in the making."""

    index: PieceIndex
    exclusions: _Exclusions
    catalogue: PieceCatalogue
    recall: bool
    limit: int
    budget: int
    spent: int = 0
    restore: list[int] = field(default_factory=list)
    append: list[str] = field(default_factory=list)
    reports: list[PieceReport] = field(default_factory=list)
    seen: set[Key] = field(default_factory=set)

    def need(self, name: str, selector: Selector) -> None:
        """Add the pieces of a selector, and at least one report."""
        before, down = len(self.reports), self.recall and self.catalogue.problem is not None
        if selector.kind == "address":
            found = self.index.addressed(selector.value)
            if len(found) != 1:
                self.reports.append(self._unresolved(name, ambiguous=bool(found), down=down))
                return
            keys = iter([self.index.key_of_address(found[0])])
        else:
            keys = self.index.named(selector)
        nothing = PieceCause.UNKNOWN
        for key in keys:
            nothing = PieceCause.REPEATED
            if key in self.seen:
                continue
            if len(self.reports) >= MAX_PIECES:
                self.reports.append(_abstention(name, PieceCause.LIMIT))
                break
            self.seen.add(key)
            self.reports.append(self._piece(name, key))
        if down and selector.kind != "address":  # it may name more
            self.reports.append(_abstention(name, PieceCause.STORE_DOWN))
        elif len(self.reports) == before:
            self.reports.append(_abstention(name, nothing))

    def _unresolved(self, name: str, *, ambiguous: bool, down: bool) -> PieceReport:
        """Return the report on an address that isn't that of one known piece."""
        if ambiguous:
            return _abstention(name, PieceCause.AMBIGUOUS)
        if not self.recall:
            return _report(name, PieceVerdict.REFUSE, None, cause=PieceCause.TENANT)
        return _abstention(name, PieceCause.STORE_DOWN if down else PieceCause.UNKNOWN)

    def _piece(self, name: str, key: Key) -> PieceReport:
        """Add one piece, by the rules of the module, and return its report."""
        address = key if isinstance(key, str) else None
        messages = self.index.messages(key)
        for message in reversed(messages):
            at = message.client_index
            if message.treatment is Treatment.WHOLE and at not in self.exclusions.evict:
                return _report(
                    name, PieceVerdict.HIT, message.address, messages=(at,), tokens=message.tokens
                )
        if address is not None and address in self.catalogue.present:
            return _report(name, PieceVerdict.HIT, address)
        restored = self.index.to_restore(key)
        stored = self.index.parts.get(address) if address is not None else None
        of = restored or messages[-1:]
        indices = tuple(each.client_index for each in of)
        tokens = sum(each.tokens for each in of) if of or stored is None else stored.tokens
        cause = self._refusal(key, bool(restored), stored)
        if cause is not None:
            return _report(
                name, PieceVerdict.REFUSE, address, cause=cause, messages=indices, tokens=tokens
            )
        if not restored and stored is not None:
            indices, tokens = (), stored.tokens
        cause = self._obstacle(tokens)
        verdict = PieceVerdict.RECOMPUTE if restored else PieceVerdict.FAULT
        if cause is not None:
            verdict = PieceVerdict.ABSTAIN
        else:
            self.spent += tokens
            self.restore += indices
            self.append += [] if restored or address is None else [address]
        return _report(
            name, verdict, address, cause=cause, messages=indices, tokens=tokens, price=tokens
        )

    def _refusal(self, key: Key, restorable: bool, stored: PartFacts | None) -> PieceCause | None:
        """Return the reason that a piece must stay out; None if it may come back."""
        forbidden = self.index.forbidden(key)
        if forbidden is not None:
            return forbidden
        if self.catalogue.forgets and stored is not None and not restorable:
            return PieceCause.FORGOTTEN
        if self.exclusions.has(key):
            return PieceCause.EXCLUDED
        if not self.recall:
            return PieceCause.TENANT
        if self.catalogue.problem is None and stored is None and not restorable:
            return PieceCause.POLICY
        return None

    def _obstacle(self, tokens: int) -> PieceCause | None:
        """Return the reason that a piece can't come back now; None if it can."""
        if self.catalogue.problem is not None:
            return PieceCause.STORE_DOWN
        if tokens > self.limit:
            return PieceCause.TOO_LARGE
        return PieceCause.OVER_BUDGET if tokens > self.budget - self.spent else None


def _protected(messages: Sequence[ContextPiece]) -> dict[int, PieceCause]:
    """Return the messages that can't be excluded, by index in the client's list."""
    found = {
        each.client_index: PieceCause.INSTRUCTIONS
        for each in messages
        if each.role in INSTRUCTION_ROLES
    }
    users = [each.client_index for each in messages if each.role == "user"]
    return found | dict.fromkeys(users[-1:], PieceCause.LAST_USER)


def _addressed(selectors: Iterable[Selector], index: PieceIndex) -> Iterator[str]:
    """Yield the addresses that selectors name, if each is the beginning of just one."""
    for selector in selectors:
        if selector.kind == "address" and len(found := index.addressed(selector.value)) == 1:
            yield found[0]


def _abstention(name: str, cause: PieceCause) -> PieceReport:
    return PieceReport(selector=name, verdict=PieceVerdict.ABSTAIN, cause=cause)


def _report(
    name: str,
    verdict: PieceVerdict,
    address: str | None,
    *,
    cause: PieceCause | None = None,
    messages: tuple[int, ...] = (),
    tokens: int = 0,
    price: int = 0,
) -> PieceReport:
    return PieceReport(
        selector=name,
        verdict=verdict,
        cause=cause,
        address=address,
        messages=messages,
        tokens=tokens,
        price_tokens=price,
    )
