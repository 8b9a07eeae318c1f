"""Data-parallel replicas of one server: each session is served by one of them.

SGLang gives a request to any replica, each of which has a pool and a tree of its own. Ranks of
data-parallel attention are replicas, too: they share the experts' forwards only. A session's
KV is only found, spliced and forgotten on its own replica. So the process that distributes requests
sends those with an envelope to the replica that their session's name gives, whatever the client
asks for; a scheduler that gets a request of another replica's session keeps nothing of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

import msgspec

from leyline_engine.admit.hints import Hints
from leyline_engine.contract import EDIT_ACTION, Reason
from leyline_engine.records.sources import SessionKey


@dataclass(frozen=True, slots=True)
class Replica:
    """One of a server's data-parallel replicas."""

    rank: int = 0
    count: int = 1

    def owns(self, session: SessionKey) -> bool:
        """Return True if a session's KV is here."""
        return session_rank(session, self.count) == self.rank

    def checked(self, hints: Hints) -> Hints:
        """Return the hints if they came to the right replica, and refuse others.

        Nothing could be found here of another replica's session, and a forget would report no
        slots.
        """
        if hints.payload is None or self.owns((hints.payload.scope, hints.payload.session)):
            return hints
        return replace(
            hints,
            payload=None,
            invalid=Reason.UNSUPPORTED_RUNTIME,
            detail="kv_hints: the request came to another data-parallel replica than its session's",
        )


def replica_of(parallel: Any) -> Replica:
    """Return the replica of this scheduler process.

    Args:
        parallel: SGLang's ``ParallelContext``; with data-parallel attention it names a rank twice.
    """
    count = int(parallel.num_dp_ranks)
    if count == 1:
        return Replica()
    attention = int(parallel.attn_dp_size) > 1
    return Replica(int(parallel.attn_dp_rank if attention else parallel.dp_rank), count)


def session_rank(session: SessionKey, replicas: int) -> int:
    """Return the replica of a session; the same in every process, and as likely each."""
    scope, name = session
    named = f"{len(scope)}:{scope}{name}".encode("utf-8", "surrogatepass")
    return int.from_bytes(blake2b(named, digest_size=8).digest(), "big") % replicas


def pin_session(request: Any, replicas: int) -> None:
    """Send a request to its session's replica.

    Args:
        request: SGLang's ``GenerateReqInput``, whose envelope was packed; SGLang places a request
            without an envelope that names a session.
    """
    session = _session_of(request) if replicas > 1 else None
    if session is not None:
        request.routed_dp_rank = session_rank(session, replicas)


class _Owner(msgspec.Struct):
    session: str
    scope: str


class _Action(msgspec.Struct):
    action_type: str
    payload: msgspec.Raw = msgspec.Raw(b"{}")


class _Actions(msgspec.Struct):
    actions: list[_Action]


def _session_of(request: Any) -> SessionKey | None:
    """Return the session that an envelope names. Nobody has checked yet that it may."""
    params = request.sampling_params
    custom = params.get("custom_params") if isinstance(params, dict) else None
    packed = custom.get("kv_hints") if isinstance(custom, dict) else None
    if packed is None and request.kv_hints is not None:
        packed = msgspec.json.encode(request.kv_hints)
    if not isinstance(packed, str | bytes):
        return None
    try:
        found = msgspec.json.decode(packed, type=_Actions).actions
        edits = [action.payload for action in found if action.action_type == EDIT_ACTION]
        owners = {
            (owner.scope, owner.session)
            for owner in (msgspec.json.decode(edit, type=_Owner) for edit in edits)
        }
    except (msgspec.DecodeError, RecursionError):
        return None
    return owners.pop() if len(owners) == 1 else None
