"""A request's working set, carried out on the list that policies left. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from leyline_policies import Memo
from leyline_policies.context import TOKENS, Context
from leyline_policies.conversation import pair_calls, tags_of, with_partners
from leyline_policies.marks import edit
from leyline_policies.policy import Mode
from leyline_policies.recall import address_of, evicted_by

from ..model.asides import Aside, RecalledTexts
from ..model.messages import Message, fingerprint, text_of
from ..model.parts import PartFacts
from ..model.prepared import POLICY, Change, SentMessage
from ..model.working_set import ContextPiece, PieceCatalogue, Treatment, WorkingSet
from ..request.working_set import ContextOption
from .asides import CHANGE, put_back
from .running import PolicySession
from .stage import Stage
from .working_set import plan_working_set

_ADDRESS = "address"


@dataclass(frozen=True, slots=True)
class Shelf:
    """The state of the store for a request with a working set."""

    option: ContextOption
    limit_tokens: int
    """Most tokens that one request brings back."""
    recall: bool = True
    """False if the tenant has no recall."""
    parts: tuple[PartFacts, ...] = ()
    forgotten: frozenset[str] = frozenset()
    problem: str | None = None
    """See :class:`~..model.working_set.PieceCatalogue`."""


@dataclass(frozen=True, slots=True)
class Recall:
    """The texts that a turn may get back."""

    asides: tuple[Aside, ...] = ()
    """Calls of the recall tool that the client doesn't see, oldest first."""
    told: RecalledTexts | None = None
    """Evicted texts to put back; None if nothing may be."""
    shelf: Shelf | None = None
    """The request's working set, and the store; None if it names none."""

    def put_back(
        self, stage: Stage, prints: Sequence[int], memo: Memo, gone: Collection[int] = ()
    ) -> Stage:
        """Return the list with asides and references; see :func:`~.asides.put_back`."""
        if self.told is None:
            return stage
        return put_back(stage, prints, self.asides, self.told, memo, gone=gone)


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Replace the text of messages that a request excludes."""

    name: ClassVar[str] = "context"
    mode: ClassVar[Mode] = "amortize"
    trusted: ClassVar[bool] = True

    places: frozenset[int] = field(default=frozenset())
    """Places in the list."""

    def transform(self, messages: list[Message], turn_idx: int, context: Context) -> list[Message]:
        """Return the messages with placeholders."""
        return context.edited(messages, _left_out, sorted(self.places))


def planned_set(
    shelf: Shelf,
    untouched: Stage,
    done: Stage,
    condemned: Collection[int],
    session: PolicySession,
) -> WorkingSet:
    """Return the changes that a request's working set makes.

    Args:
        untouched: the client's list.
        done: the list after all policies.
        condemned: indices of messages in quarantine.
        session: counts the tokens of a message.
    """
    memo, count = session.memo, session.count
    client = [entry.message for entry in untouched.sent if entry.client_index is not None]
    sent = {entry.client_index: entry for entry in done.sent}
    dropped = {each.client_index: each.change for each in done.dropped}
    tools = {at: call.name for call in pair_calls(client) for at in call.results}
    pieces = []
    for at, message in enumerate(client):
        address = memo.get(message, _ADDRESS, _address)
        treatment, part, policy = Treatment.QUARANTINED, None, ""
        if at not in condemned:
            if at in done.demands:
                treatment = Treatment.FORGOTTEN
            elif at in sent:
                treatment, part, policy = _treated(sent[at], message, address)
            else:
                treatment, policy = Treatment.DROPPED, _policy(dropped.get(at))
        pieces.append(
            ContextPiece(
                client_index=at,
                role=str(message.get("role", "")),
                tool=tools.get(at, ""),
                tags=tags_of(message),
                tokens=memo.get(message, TOKENS, count),
                address=address,
                treatment=treatment,
                part=part,
                policy=policy,
            )
        )
    catalogue = PieceCatalogue(
        tuple(pieces),
        shelf.parts,
        shelf.forgotten,
        shelf.problem,
        frozenset(_put_back(done, memo)),
        _demands_anew(untouched, done, session),
    )
    return plan_working_set(
        shelf.option, catalogue, recall=shelf.recall, limit_tokens=shelf.limit_tokens
    )


def _demands_anew(untouched: Stage, done: Stage, session: PolicySession) -> bool:
    """Return True if a turn demands a forget that the last one didn't."""
    last = session.last
    if last is None:
        return bool(done.demands)
    known = {(last.client_fingerprints[place], mark) for place, mark in last.forget_marks.items()}
    own = {e.client_index: e.message for e in untouched.sent if e.client_index is not None}
    return any(
        place not in own or (fingerprint(own[place]), mark) not in known
        for place, mark in done.demands.items()
    )


def _put_back(done: Stage, memo: Memo) -> Iterator[str]:
    """Yield the addresses of texts that asides hold whole."""
    for entry in done.sent:
        is_whole = entry.client_index is None and entry.changes == (CHANGE,)
        if is_whole and entry.message.get("role") == "tool":
            yield memo.get(entry.message, _ADDRESS, _address) or ""


def restored(done: Stage, untouched: Stage, indices: Iterable[int]) -> Stage:
    """Return the list with messages of the client's in place of what policies made of them.

    Args:
        indices: in the client's list. What belongs to a removed one, as a call to its result,
            comes back with it.
    """
    wanted = set(indices)
    own = {e.client_index: e for e in untouched.sent if e.client_index is not None}
    present = {entry.client_index for entry in done.sent}
    calls = pair_calls([own[at].message for at in sorted(own)])
    missing = with_partners({at for at in wanted if at not in present}, calls) - present
    sent: list[SentMessage] = []
    waiting = deque(sorted(missing))
    for entry in done.sent:
        index = entry.client_index
        while index is not None and waiting and waiting[0] < index:
            sent.append(own[waiting.popleft()])
        sent.append(own[index] if index is not None and index in wanted else entry)
    sent += [own[at] for at in waiting]
    dropped = tuple(each for each in done.dropped if each.client_index not in missing)
    return replace(done, sent=tuple(sent), dropped=dropped)


def left_out(done: Stage, indices: Collection[int]) -> LeftOut:
    """Return the policy that takes the text of messages out.

    Args:
        indices: in the client's list.
    """
    places = (at for at, entry in enumerate(done.sent) if entry.client_index in indices)
    return LeftOut(frozenset(places))


def _treated(
    entry: SentMessage, message: Message, address: str | None
) -> tuple[Treatment, str | None, str]:
    """Return the treatment of a sent message, the part that holds its text, and the policy."""
    if not entry.changes or entry.message is message:
        return Treatment.WHOLE, None, ""
    policy = _policy(entry.changes[-1])
    if address is not None and any(each.address == address for each in evicted_by(entry.message)):
        return Treatment.EVICTED, address, policy
    # It bears the stubs of others.
    is_whole = text_of(message) in text_of(entry.message)
    return (Treatment.WHOLE if is_whole else Treatment.DROPPED), None, policy


def _policy(change: Change | None) -> str:
    kind, _, name = change.cause.partition(":") if change is not None else ("", "", "")
    return name.partition(":")[0] if kind == POLICY else ""


def _address(message: Message) -> str | None:
    text = text_of(message)
    return address_of(text) if text else None


def _left_out(message: Message) -> Message:
    return edit(message, stub="[left out]")
