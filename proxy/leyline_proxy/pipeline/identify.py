"""Which session a request belongs to."""

from __future__ import annotations

import hmac
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from uuid import uuid4

from ..core.identity import (
    CONTINUES,
    OWN_HEADER,
    choose_session,
    goes_on,
    history_chain,
    likeness,
    session_key,
    shortest_partial,
)
from ..core.session import Session
from ..sessions import SessionStore
from .request import ChatRequest

SHARED_KEYS = frozenset({"prompt_cache_key", "user"})
"""Names that several conversations may share; the history tells those apart."""

NAMED = "named"
"""Store key of sessions that are found by their id alone."""

_PLAIN_ID = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._:@-]{1,128}")

_BESIDE = 6
"""Conversations beside the one that took a harness's name that are found by the name, too."""


@dataclass(frozen=True, slots=True)
class Identity:
    """A session's place in the store, and the session itself if there is one."""

    session_id: str
    key: str
    chain: tuple[int, ...]
    """The history to find it by; empty where it is found by its id alone."""
    session: Session | None
    opens: tuple[int, ...] = ()
    """The history for which it holds its id in the :class:`Openings` until its turn is over."""
    named: bool = True
    """Whether its id was made of a name that the caller gave it, and may have been in use before;
    else it is one that the proxy made up."""


@dataclass(slots=True)
class _Opening:
    length: int
    value: int
    """Of the chain at that length: of the whole first request."""
    holders: int = 0


class Openings:
    """Which conversation took an id first, while no turn of it is settled. No more are held than
    turns are under way."""

    def __init__(self) -> None:
        self._taken: dict[tuple[str, str], _Opening] = {}

    def __len__(self) -> int:
        return len(self._taken)

    def takes(self, tenant: str, session_id: str, chain: Sequence[int]) -> bool:
        """Whether the id is this conversation's; if so, until :meth:`leave`.

        Args:
            chain: the history of its request.
        """
        place = (tenant, session_id)
        first = self._taken.setdefault(place, _Opening(len(chain), chain[-1]))
        if len(chain) < first.length or chain[first.length - 1] != first.value:
            return False
        first.holders += 1
        return True

    def leave(self, tenant: str, identity: Identity) -> None:
        """A turn is over; its conversation is known by its session now, or has none."""
        place = (tenant, identity.session_id)
        first = self._taken.get(place)
        if not identity.opens or first is None:
            return
        first.holders -= 1
        if not first.holders:
            del self._taken[place]


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
        key: see :func:`~leyline_proxy.core.identity.history_chain`.
        secret: see :func:`public_id`.
        openings: of all requests of this process; None for a request that isn't to be answered.
    """
    name, where = session_key(request.headers, request.body)
    if name is not None and where == OWN_HEADER:
        session_id = public_id(name, secret)
        session = await store.get(request.tenant.name, session_id)
        return Identity(session_id, NAMED, (), session)
    chain = _chain_of(request, key)
    # A name may be as long as a body.
    shared = f"{where}:{public_id(name, secret)}" if name is not None else ""
    session = await _by_history(store, request, shared, chain)
    if session is None and name is not None and where not in SHARED_KEYS:
        found = await _by_name(store, request, public_id(name, secret), chain, openings)
        if found is None:
            beside = [public_id(f"{name} beside {number}", secret) for number in range(_BESIDE)]
            found = await _beside(
                store, request, beside, Identity("", shared, chain, None), openings
            )
        if found is not None:
            return found
    session_id = session.id if session else f"s-{uuid4().hex[:20]}"
    return Identity(session_id, shared, chain, session, named=False)


async def _by_name(
    store: SessionStore,
    request: ChatRequest,
    session_id: str,
    chain: tuple[int, ...],
    openings: Openings | None,
) -> Identity | None:
    """The conversation that a harness's name stands for, if that is this request's: the first that
    came with it, as opposed to others that the harness has beside it."""
    session = await store.get(request.tenant.name, session_id)
    if session is None:
        if openings is None:
            return Identity(session_id, NAMED, (), None)
        takes = openings.takes(request.tenant.name, session_id, chain)
        return Identity(session_id, NAMED, (), None, opens=chain) if takes else None
    if session.turns and not _likeness(session, request):
        return None
    return Identity(session_id, NAMED, (), session)


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
    tenant = request.tenant.name
    sessions = [await store.get(tenant, session_id) for session_id in ids]
    known = [session for session in sessions if session is not None]
    best = max(known, key=lambda session: _likeness(session, request), default=None)
    if best is not None and _likeness(best, request):
        return replace(new, session_id=best.id, session=best)
    if openings is None:
        return None
    free = [place for place, session in zip(ids, sessions, strict=True) if session is None]
    for session_id in free:
        if openings.takes(tenant, session_id, new.chain):
            return replace(new, session_id=session_id, opens=new.chain)
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
    store: SessionStore,
    request: ChatRequest,
    key: str,
    chain: Sequence[int],
) -> Session | None:
    """A conversation without an answer in it is a new one, whatever it has in common."""
    if not any(message.get("role") in CONTINUES for message in request.messages):
        return None
    roles = [str(message.get("role")) for message in request.messages]
    tenant = request.tenant.name
    matches = await store.matches(tenant, key, chain, shortest_partial(roles))
    chosen = choose_session(matches, roles)
    session = await store.get(tenant, chosen.session) if chosen is not None else None
    if session is None or chosen is None or chosen.whole:
        return session
    stored = session.turns[-1].prepared.client_fingerprints if session.turns else ()
    return session if goes_on(stored, request.fingerprints, roles, chosen.length) else None


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
