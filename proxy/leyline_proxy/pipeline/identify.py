"""Which session a request belongs to."""

from __future__ import annotations

import hmac
import re
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from uuid import uuid4

from ..core.identity import (
    CONTINUES,
    OWN_HEADER,
    carries_on,
    choose_session,
    goes_on,
    history_chain,
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

_PLAIN_ID = re.compile(r"[A-Za-z0-9._:@-]{1,128}")
_MAX_OPENINGS = 4096


@dataclass(frozen=True, slots=True)
class Identity:
    """A session's place in the store, and the session itself if there is one."""

    session_id: str
    key: str
    chain: tuple[int, ...]
    """The history to find it by; empty where it is found by its id alone."""
    session: Session | None


class Openings:
    """Which conversation took a harness's name first, while its first turn isn't settled."""

    def __init__(self) -> None:
        self._taken: OrderedDict[tuple[str, str], tuple[int, ...]] = OrderedDict()

    def takes(self, tenant: str, session_id: str, fingerprints: tuple[int, ...]) -> bool:
        """Whether the name is this conversation's."""
        place = (tenant, session_id)
        first = self._taken.setdefault(place, fingerprints)
        self._taken.move_to_end(place)
        if len(self._taken) > _MAX_OPENINGS:
            self._taken.popitem(last=False)
        return fingerprints[: len(first)] == first


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
    shared = f"{where}:{name}" if name is not None else ""
    session = await _by_history(store, request, shared, chain)
    if session is None and name is not None and where not in SHARED_KEYS:
        session_id = public_id(name, secret)
        named = await store.get(request.tenant.name, session_id)
        if _takes_name(request, session_id, named, openings):
            return Identity(session_id, NAMED, (), named)
    session_id = session.id if session else f"s-{uuid4().hex[:20]}"
    return Identity(session_id, shared, chain, session)


def _takes_name(
    request: ChatRequest, session_id: str, session: Session | None, openings: Openings | None
) -> bool:
    """Whether the conversation that a harness's name stands for is this request's: the first that
    came with it, as opposed to others that the harness has beside it."""
    if session is None:
        tenant = request.tenant.name
        return openings is None or openings.takes(tenant, session_id, request.fingerprints)
    stored = [turn.prepared.client_fingerprints for turn in session.turns]
    roles = [str(message.get("role")) for message in request.messages]
    return not stored or carries_on(stored, request.fingerprints, roles)


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
