"""Which session a request belongs to."""

from __future__ import annotations

import hmac
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
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

SHARED_KEYS = frozenset({"prompt_cache_key", "user"})
"""Names that several conversations may share; the history tells those apart."""

NAMED = "named"
"""Store key of sessions that are found by their id alone."""

_PLAIN_ID = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._:@-]{1,128}")

_BESIDE = 6
"""Conversations beside the one that took a harness's name that are found by the name, too."""


Found = Literal["header", "name", "likeness", "history"]
"""How a session was found: by the header that is Leyline's own; by a name that a harness gives; by
likeness to one of several conversations that a harness gives one name; by what the history has in
common with a stored one, and else it is new."""

_TRUST: dict[Found, Trust] = {
    "header": "name",
    "name": "opening",
    "likeness": "messages",
    "history": "messages",
}


@dataclass(frozen=True, eq=False, slots=True)
class Hold:
    """That a turn is under way in a session."""

    tenant: str
    session_id: str
    chain: tuple[int, ...]
    """The history of its request."""
    opens: bool
    """Whether it is the first turn of a conversation that a harness gives a name."""


@dataclass(frozen=True, slots=True)
class Identity:
    """A session's place in the store, and the session itself if there is one."""

    session_id: str
    key: str
    chain: tuple[int, ...]
    """The history to find it by; empty where it is found by its id alone."""
    session: Session | None
    found: Found = "history"
    hold: Hold | None = None
    """What keeps other conversations out of the session until the turn is over."""

    @property
    def named(self) -> bool:
        """Whether its id was made of a name that the caller gave it, and may have been in use
        before; else it is one that the proxy made up."""
        return self.found != "history"

    @property
    def trust(self) -> Trust:
        """Why what the session retains may be of this request's conversation.

        A name says so of what was retained under it: a session that was found otherwise before may
        have got turns of another conversation.
        """
        named = self.session is None or self.session.key == NAMED
        return _TRUST[self.found] if named else "messages"


class Openings:
    """Turns under way in sessions that aren't found by a sure name: which conversation took an id
    first, and which one goes on with a session. No more are held than turns are under way."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, str], list[Hold]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def take(self, hold: Hold) -> Hold | None:
        """Hold a session until :meth:`leave`; None where another conversation holds it.

        An opening may be held by all that goes on from the first one's list. To go on with a
        session that the history told, a list must be the very one that others under way have: of
        two that differ, one would be retained among the turns of the other.
        """
        others = self._held.setdefault((hold.tenant, hold.session_id), [])
        for other in others[:1] if hold.opens else others:
            theirs = other.chain
            if hold.chain[: len(theirs)] != theirs or (not hold.opens and hold.chain != theirs):
                return None
        others.append(hold)
        return hold

    def leave(self, hold: Hold | None) -> None:
        """The turn is over, or its session is stored; does nothing the second time."""
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
    """The session that the request names, else the one whose conversation it continues.

    Args:
        key: see :func:`~leyline_proxy.model.history.history_chain`.
        secret: see :func:`public_id`.
        openings: of all requests of this process; None for a request that isn't to be answered.
    """
    name, where = session_key(request.headers, request.body)
    if name is not None and where == OWN_HEADER:
        session_id = public_id(name, secret)
        session = await store.get(request.tenant.name, session_id)
        return Identity(session_id, NAMED, (), session, "header")
    chain = _chain_of(request, key)
    # A name may be as long as a body.
    shared = f"{where}:{public_id(name, secret)}" if name is not None else ""
    new = Identity("", shared, chain, None)
    found = await _by_history(store, request, new, openings)
    if found is None and name is not None and where not in SHARED_KEYS:
        found = await _by_name(store, request, public_id(name, secret), chain, openings)
        if found is None:
            beside = [public_id(f"{name} beside {number}", secret) for number in range(_BESIDE)]
            found = await _beside(store, request, beside, new, openings)
    return found or replace(new, session_id=f"s-{uuid4().hex[:20]}")


async def _by_name(
    store: SessionStore,
    request: ChatRequest,
    session_id: str,
    chain: tuple[int, ...],
    openings: Openings | None,
) -> Identity | None:
    """The conversation that a harness's name stands for, if that is this request's: the first that
    came with it, as opposed to others that the harness has beside it."""
    tenant = request.tenant.name
    session = await store.get(tenant, session_id)
    named = Identity(session_id, NAMED, (), session, "name")
    if session is None:
        if openings is None:
            return named
        hold = openings.take(Hold(tenant, session_id, chain, opens=True))
        return replace(named, hold=hold) if hold is not None else None
    return None if session.turns and not _likeness(session, request) else named


async def _beside(
    store: SessionStore,
    request: ChatRequest,
    ids: Sequence[str],
    new: Identity,
    openings: Openings | None,
) -> Identity | None:
    """One of the conversations beside it, where the history alone tells nothing, as with a system
    prompt that is another on every turn; else the first id that is free.

    Args:
        ids: that they may have.
        new: what they are found by.
    """
    tenant, new = request.tenant.name, replace(new, found="likeness")
    sessions = [await store.get(tenant, session_id) for session_id in ids]
    # One that has a certain name since may remember what its messages don't show.
    known = [each for each in sessions if each is not None and each.key == new.key]
    best = max(known, key=lambda session: _likeness(session, request), default=None)
    if best is not None and _likeness(best, request):
        return replace(new, session_id=best.id, session=best)
    if openings is None:
        return None
    free = [place for place, session in zip(ids, sessions, strict=True) if session is None]
    for session_id in free:
        hold = openings.take(Hold(tenant, session_id, new.chain, opens=True))
        if hold is not None:
            return replace(new, session_id=session_id, hold=hold)
    return None


def _likeness(session: Session, request: ChatRequest) -> int:
    stored = [turn.prepared.client_fingerprints for turn in session.turns]
    roles = [str(message.get("role")) for message in request.messages]
    return likeness(stored, request.fingerprints, roles)


def _chain_of(request: ChatRequest, key: bytes) -> tuple[int, ...]:
    """The request's history; what an earlier body began with isn't chained again."""
    known = request.read.chains.get(key, ()) if request.read is not None else ()
    chain = tuple(history_chain(request.fingerprints, key, known))
    if request.read is not None:
        request.read.chains[key] = chain
    return chain


async def _by_history(
    store: SessionStore, request: ChatRequest, new: Identity, openings: Openings | None
) -> Identity | None:
    """A conversation without an answer in it is a new one, whatever it has in common.

    Args:
        new: with the history and the store key to find it by.
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


def _goes_on(
    session: Session, request: ChatRequest, roles: Sequence[str], match: HistoryMatch
) -> bool:
    stored = session.turns[-1].prepared.client_fingerprints if session.turns else ()
    return goes_on(stored, request.fingerprints, roles, match.length)


def public_id(name: str, secret: str | None = None) -> str:
    """A session id fit for a URL and a header: the caller's own name where it is plain.

    Args:
        secret: keys the hash of any other name. Without one the hash is bare, because an id must
            be the same after a restart.
    """
    if _PLAIN_ID.fullmatch(name):
        return name
    digest = hmac.new((secret or "").encode(), name.encode("utf-8", "surrogatepass"), "sha256")
    return f"h-{digest.hexdigest()[:32]}"
