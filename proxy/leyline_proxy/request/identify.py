"""The session that a request belongs to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal
from uuid import uuid4

from ..model.history import (
    CONTINUES,
    OWN_HEADER,
    HistoryMatch,
    choose_sessions,
    goes_on,
    history_chain,
    likeness,
    session_key,
    shortest_partial,
)
from ..model.session import Session
from ..model.undeclared import Trust
from ..sessions import SessionStore
from .parse import ChatRequest
from .resemblance import Resemblance, offers_tools
from .session_name import SessionName, public_id, session_name

SHARED_KEYS = frozenset({"prompt_cache_key", "user"})
"""Names that several conversations may share; the history distinguishes them."""

NAMED = "named"
"""Store key of sessions that are found by their id alone."""

_BESIDE = 6
"""Number of further conversations that a harness's name also finds."""


Found = Literal["header", "name", "likeness", "history"]
"""The way that a session was found: by Leyline's own header; by a harness's name; by likeness to
one of several conversations under a harness's name; by the history that it shares with a stored
one, or else it is new."""

_TRUST: dict[Found, Trust] = {
    "header": "name",
    "name": "opening",
    "likeness": "messages",
    "history": "messages",
}


@dataclass(frozen=True, eq=False, slots=True)
class Hold:
    """A turn under way in a session."""

    tenant: str
    session_id: str
    chain: tuple[int, ...]
    """History of the turn's request."""
    opens: bool
    """True for the first turn of a conversation that a harness names."""
    offers_tools: bool = False
    """True if it offers the model tools: it takes the name from a first turn without any."""


@dataclass(frozen=True, slots=True)
class Identity:
    """A session's place in the store, and the session itself if there is one."""

    session_id: str
    key: str
    chain: tuple[int, ...]
    """History to find the session by; empty if it is found by its id alone."""
    session: Session | None
    found: Found = "history"
    retells: bool = False
    """True if the request is a transcript of the session, to be summarised: a turn under its name
    that is no step of its conversation."""
    hold: Hold | None = None
    """The hold that keeps other conversations out of the session until the turn is over."""
    name: str = field(default="", repr=False)
    """The caller's name for people, if the id is another text; see :class:`.SessionName`."""

    @property
    def shown_name(self) -> str:
        """The name for people, also of a session that was found in another way."""
        return self.name or (self.session.name if self.session is not None else "")

    @property
    def named(self) -> bool:
        """True if the id was made from the caller's name, which may have been in use before; False
        if the proxy invented it."""
        return self.found != "history"

    @property
    def trust(self) -> Trust:
        """The evidence that the session's retained turns belong to this request's conversation.

        A name is evidence only for turns retained under it: a session once found otherwise may
        contain turns of another conversation. A transcript continues none of them.
        """
        if self.retells:
            return "messages"
        named = self.session is None or self.session.key == NAMED
        return _TRUST[self.found] if named else "messages"


class Openings:
    """Turns under way in sessions without a certain name: they show which conversation took an id
    first and which one continues a session. It holds at most as many entries as turns are under
    way."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, str], list[Hold]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def take(self, hold: Hold) -> Hold | None:
        """Hold a session until :meth:`leave`; return None if another conversation holds it.

        All requests that continue the first one's list may hold an opening, and so may an agent's
        beside a request without tools, such as one for a title. To continue a session found by its
        history, a list must equal those of the other turns under way: of two that differ, one would
        be retained among the turns of the other.
        """
        others = self._held.setdefault((hold.tenant, hold.session_id), [])
        rivals = [each for each in others if each.offers_tools or not hold.offers_tools]
        for other in rivals[:1] if hold.opens else others:
            theirs = other.chain
            if hold.chain[: len(theirs)] != theirs or (not hold.opens and hold.chain != theirs):
                return None
        others.append(hold)
        return hold

    def leave(self, hold: Hold | None) -> None:
        """Release the session after the turn or once it is stored; a second call does nothing."""
        others = self._held.get((hold.tenant, hold.session_id), []) if hold is not None else []
        if hold in others:
            others.remove(hold)
        if hold is not None and not others:
            self._held.pop((hold.tenant, hold.session_id), None)


async def identify(
    store: SessionStore,
    request: ChatRequest,
    key: bytes = b"",
    *,
    secret: str | None = None,
    openings: Openings | None = None,
) -> Identity:
    """Return the session that the request names, or else the one whose conversation it continues.

    Args:
        key: see :func:`~leyline_proxy.model.history.history_chain`.
        secret: see :func:`.public_id`.
        openings: of all requests of this process; None for a request that won't be answered.
    """
    name, where = session_key(request.headers, request.body)
    if name is not None and where == OWN_HEADER:
        own = session_name(name, secret)
        session = await store.get(request.tenant.name, own.id)
        if session is not None and session.key != NAMED:
            # Its id is no proof that this caller sent its messages.
            session = session.shown_to(request.fingerprints)
        return Identity(own.id, NAMED, (), session, "header", name=own.shown)
    chain = chain_of(request, key)
    # A name may be as long as a body.
    shared = f"{where}:{public_id(name, secret)}" if name is not None else ""
    new = Identity("", shared, chain, None)
    found = await _by_history(store, request, new, openings)
    if found is None and request.continues is not None:
        found = await _by_compaction(store, request, request.continues, new)
    if found is None and name is not None and where not in SHARED_KEYS:
        resemblance = Resemblance(request, key)
        own = session_name(name, secret)
        found = await _by_name(store, request, own, chain, openings, resemblance=resemblance)
        if found is None:
            beside = [session_name(f"{name} beside {number}", secret) for number in range(_BESIDE)]
            found = await _beside(store, request, beside, new, openings, resemblance=resemblance)
    return found or replace(new, session_id=f"s-{uuid4().hex[:20]}")


async def _by_compaction(
    store: SessionStore, request: ChatRequest, session_id: str, new: Identity
) -> Identity | None:
    """Return the session that wrote the compaction in a request, if it is still known.

    Nothing else shows it on the first turn after a compaction: no message is left that the session
    has seen.
    """
    session = await store.get(request.tenant.name, session_id)
    if session is None:
        return None
    if session.key == NAMED:
        return Identity(session_id, NAMED, (), session, "name")
    return replace(new, session_id=session_id, session=session)


async def _by_name(
    store: SessionStore,
    request: ChatRequest,
    name: SessionName,
    chain: tuple[int, ...],
    openings: Openings | None,
    *,
    resemblance: Resemblance,
) -> Identity | None:
    """Return the conversation of a harness's name, if it is this request's, or the request is a
    transcript of it: the first one under the name, or an agent's after a request for a title, not
    another that the harness runs alongside."""
    tenant = request.tenant.name
    session = await store.get(tenant, name.id)
    named = Identity(name.id, NAMED, (), session, "name", name=name.shown)
    if session is None or resemblance.takes_over(session):
        if openings is None:
            return named
        first = Hold(tenant, name.id, chain, opens=True, offers_tools=offers_tools(request))
        hold = openings.take(first)
        return replace(named, hold=hold) if hold is not None else None
    if not session.turns or _likeness(session, request) or resemblance.quotes(session):
        return named
    return replace(named, retells=True) if resemblance.retells(session) else None


async def _beside(
    store: SessionStore,
    request: ChatRequest,
    names: Sequence[SessionName],
    new: Identity,
    openings: Openings | None,
    *,
    resemblance: Resemblance,
) -> Identity | None:
    """Return one of the further conversations under the name; if none is alike, the first free id.

    Serves requests whose history alone shows nothing, such as those with a system prompt that
    changes on every turn.

    Args:
        names: their possible names.
        new: holds the history and store key to find them by.
    """
    tenant, new = request.tenant.name, replace(new, found="likeness")
    sessions = [await store.get(tenant, name.id) for name in names]
    # A session with a certain name by now may remember more than its messages show.
    known = [each for each in sessions if each is not None and each.key == new.key]
    best = max(known, key=lambda session: _likeness(session, request), default=None)
    if best is None or not _likeness(best, request):
        best = next((session for session in known if resemblance.quotes(session)), None)
    if best is not None:
        return replace(new, session_id=best.id, session=best)
    if openings is None:
        return None
    free = [name for name, session in zip(names, sessions, strict=True) if session is None]
    for name in free:
        hold = openings.take(Hold(tenant, name.id, new.chain, opens=True))
        if hold is not None:
            return replace(new, session_id=name.id, hold=hold, name=name.shown)
    return None


def _likeness(session: Session, request: ChatRequest) -> int:
    stored = [turn.prepared.client_fingerprints for turn in session.turns]
    roles = [str(message.get("role")) for message in request.messages]
    return likeness(stored, request.fingerprints, roles)


def chain_of(request: ChatRequest, key: bytes) -> tuple[int, ...]:
    """Return the request's history without chaining the part from an earlier body again."""
    known = request.read.chains.get(key, ()) if request.read is not None else ()
    chain = tuple(history_chain(request.fingerprints, key, known))
    if request.read is not None:
        request.read.chains[key] = chain
    return chain


async def _by_history(
    store: SessionStore, request: ChatRequest, new: Identity, openings: Openings | None
) -> Identity | None:
    """Return the session that shares the request's history; None for a list without an answer.

    Args:
        new: holds the history and the store key to find it by.
    """
    if not any(message.get("role") in CONTINUES for message in request.messages):
        return None
    roles = [str(message.get("role")) for message in request.messages]
    tenant = request.tenant.name
    matches = await store.matches(tenant, new.key, new.chain, shortest_partial(roles))
    for chosen in choose_sessions(matches, roles):
        session = await store.get(tenant, chosen.session)
        if session is None or not (chosen.whole or _goes_on(session, request, roles, chosen)):
            continue
        found = replace(new, session_id=session.id, session=session)
        if openings is None:
            return found
        hold = openings.take(Hold(tenant, session.id, new.chain, opens=False))
        if hold is not None:
            return replace(found, hold=hold)
    return None


async def sent_before(
    store: SessionStore, request: ChatRequest, new: Identity, openings: Openings | None = None
) -> Identity | None:
    """Return the session that has already sent a list without an answer, or a beginning of it.

    Equal openings are no evidence of one conversation, so only a demand to forget something of the
    list is a reason to take that session, and its history stays: else whoever knows how another
    conversation began could take it from there. Of several, the latest is found.

    Args:
        new: holds the history and the store key to find it by.
    """
    tenant = request.tenant.name
    matches = await store.matches(tenant, new.key, new.chain, len(new.chain) + 1)
    for match in (each for each in matches if each.whole):
        session = await store.get(tenant, match.session)
        if session is None:
            continue
        own = new.chain[: match.length]
        found = replace(new, session_id=session.id, session=session, chain=own)
        if openings is None:
            return found
        hold = openings.take(Hold(tenant, session.id, new.chain, opens=False))
        return replace(found, hold=hold) if hold is not None else None
    return None


def demands_forget(request: ChatRequest) -> bool:
    """Return True if the request itself says that something of its list must be forgotten."""
    return any(each.mode == "forget" for each in request.options.edits) or any(
        each.forget or each.verdict == "quarantine" for each in request.annotations.values()
    )


def _goes_on(
    session: Session, request: ChatRequest, roles: Sequence[str], match: HistoryMatch
) -> bool:
    stored = session.last.prepared.client_fingerprints if session.last is not None else ()
    return goes_on(stored, request.fingerprints, roles, match.length)
