"""Which session a request belongs to."""

from __future__ import annotations

import hmac
import re
from collections.abc import Sequence
from dataclasses import dataclass
from uuid import uuid4

from ..core.identity import choose_session, goes_on, history_chain, session_key, shortest_partial
from ..core.session import Session
from ..sessions import SessionStore
from .request import ChatRequest

SHARED_KEYS = frozenset({"prompt_cache_key", "user"})
"""Names that several conversations may share; the history tells those apart."""

NAMED = "named"
"""Store key of sessions that are found by their id alone."""

_PLAIN_ID = re.compile(r"[A-Za-z0-9._:@-]{1,128}")
_CONTINUES = frozenset({"assistant", "tool", "function"})


@dataclass(frozen=True, slots=True)
class Identity:
    """A session's place in the store, and the session itself if there is one."""

    session_id: str
    key: str
    chain: tuple[int, ...]
    """The history to find it by; empty where it is found by its id alone."""
    session: Session | None


async def identify(
    store: SessionStore, request: ChatRequest, key: bytes = b"", *, secret: str | None = None
) -> Identity:
    """The session that the request names, else the one whose conversation it continues.

    Args:
        key: see :func:`~leyline_proxy.core.identity.history_chain`.
        secret: see :func:`public_id`.
    """
    name, where = session_key(request.headers, request.body)
    if name is not None and where not in SHARED_KEYS:
        session_id = public_id(name, secret)
        session = await store.get(request.tenant.name, session_id)
        return Identity(session_id, NAMED, (), session)
    chain = _chain_of(request, key)
    shared = f"{where}:{name}" if name is not None else ""
    session = await _by_history(store, request, shared, chain)
    session_id = session.id if session else f"s-{uuid4().hex[:20]}"
    return Identity(session_id, shared, chain, session)


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
    if not any(message.get("role") in _CONTINUES for message in request.messages):
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
