"""The stored form of a session in Redis, and its readers. Pure."""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from ...model.history import HistoryMatch, shortest_partial
from ...model.session import Place, Session
from ..codec import UNENCODABLE, decode_session, encode_session
from ..summary import SessionOverview, overview
from .keys import CHAIN, DATA, EPOCH, KEY, NAME, OVERVIEW, UPDATED, VERSION
from .sealing import Seal, owner_of

STALE_S = 900.0
"""A turn in flight for longer belongs to a proxy that was killed. From then on it is a loss like
any other, which a forget of everything covers."""


LOST = "lost:"
"""Prefix of the name of a note on where lost turns ran; an engine's run follows."""


class InFlight(msgspec.Struct, array_like=True, frozen=True):
    """A turn that an engine got."""

    since: float
    """Seconds since the epoch; 0 for a turn that is over."""
    key: str
    """The session's store key."""
    run: str = ""
    """Run of the engine; empty if it retains nothing."""
    replica: str = ""

    def note(self) -> bytes:
        """Return the stored form."""
        return msgspec.msgpack.encode(self)

    @staticmethod
    def of_note(note: bytes) -> InFlight:
        """Read the stored form; an unreadable one is a turn that is over."""
        try:
            return msgspec.msgpack.decode(note, type=InFlight)
        except msgspec.MsgspecError:
            return InFlight(0.0, "")


@dataclass(frozen=True, slots=True)
class Known:
    """Result of one reading of a session."""

    tenant: str
    id: str
    version: bytes = b""
    """Empty if no account is stored."""
    session: Session | None = None
    """The session as written."""
    chain: tuple[int, ...] = ()
    key: str = ""
    extra: int = 0
    """Losses noted since it was written."""
    outdated: bool = False
    """True if it was written in another epoch, and may lack later turns."""
    in_flight: Mapping[str, InFlight] = field(default_factory=dict)

    def stale(self, now: float) -> frozenset[str]:
        """Return the turns in flight that won't be settled any more."""
        return frozenset(
            name for name, turn in self.in_flight.items() if now - turn.since > STALE_S
        )

    def as_session(self, now: float, ends: str | None = None) -> Session | None:
        """Return the session with its possible losses.

        Args:
            ends: a turn in flight that is about to be settled.
        """
        stale = self.stale(now)
        counted = sum(not name.startswith(LOST) for name in stale)
        losses = self.extra + self.outdated + counted
        others = frozenset(self.in_flight) - stale - {ends}
        known = self.session
        if known is None:
            if not losses and not others and not self.version:
                return None
            # A turn ran that is in no account.
            key = self.key or next((turn.key for turn in self.in_flight.values()), "")
            known = nothing_known(self.tenant, self.id, key, now)
        # A forget must reach every engine that got one of them.
        places = {
            turn.run: Place(turn.replica)
            for name, turn in self.in_flight.items()
            if turn.run and name != ends
        }
        return replace(
            known,
            unnamed=known.unnamed + losses,
            in_flight=others,
            places={**places, **known.places},
        )


def replicas_of(session: Session) -> dict[str, str]:
    """Return the replicas by run, of all engines that got turns of a session."""
    return {run: place.replica for run, place in session.places.items()}


def lost_places(replicas: Mapping[str, str], key: str) -> dict[str, bytes]:
    """Return the notes on where lost turns ran."""
    return {
        LOST + run: InFlight(0.0, key, run, replica).note() for run, replica in replicas.items()
    }


def text_of(raw: bytes) -> str:
    """Return a stored name; an invalid one is read as far as possible."""
    try:
        return raw.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return raw.decode("utf-8", "replace")


def nothing_known(tenant: str, session_id: str, key: str, now: float) -> Session:
    """Return a session without history, of which an engine may hold any KV."""
    return Session(session_id, tenant, key, (), (), 0, now, created=now, unnamed=1)


def fields_of(
    session: Session, chain: Sequence[int], seal: Seal, *, epoch: bytes, version: str, most: int
) -> dict[bytes, bytes | str]:
    """Return the stored fields of a session.

    Args:
        most: most bytes of a stored session. Of a longer one, or one that can't be encoded, only
            the account is stored.
    """
    owner = owner_of(session.tenant, session.id)
    data = None
    if seal.hides:
        with contextlib.suppress(*UNENCODABLE):
            data = seal.close(encode_session(session), owner)
    if data is None or len(data) > most:
        data = seal.close(encode_session(session.without_text()), owner)
    name = seal.close(session.name.encode(), owner) if seal.hides and session.name else b""
    return {
        VERSION: version,
        DATA: data,
        OVERVIEW: msgspec.msgpack.encode(replace(overview(session), name="")),
        NAME: name,
        CHAIN: array("Q", chain).tobytes(),
        KEY: session.key.encode("utf-8", "surrogatepass"),
        EPOCH: epoch,
        UPDATED: f"{session.updated:.6f}",
    }


def session_of(data: bytes | None, tenant: str, session_id: str, seal: Seal) -> Session | None:
    """Return the session; None if it can't be read or is another's."""
    record = seal.open(data or b"", owner_of(tenant, session_id))
    session = decode_session(record) if record is not None else None
    if session is None or (session.tenant, session.id) != (tenant, session_id):
        return None
    return session


def chain_of(stored: bytes | None) -> tuple[int, ...]:
    """Return a history; an empty one if it can't be read."""
    values = array("Q")
    try:
        values.frombytes(stored or b"")
    except ValueError:
        return ()
    return tuple(values)


def overview_of(
    stored: bytes | None, name: bytes | None, tenant: str, seal: Seal
) -> SessionOverview | None:
    """Return a line of the list, if it can be read; without its name, if that can't."""
    try:
        line = msgspec.msgpack.decode(stored or b"", type=SessionOverview)
    except msgspec.MsgspecError:
        return None
    opened = seal.open(name, owner_of(tenant, line.id)) if name else None
    return replace(line, name=opened.decode("utf-8", "replace")) if opened else line


def opening_of(session: Session, chain: Sequence[int]) -> int | None:
    """Return the hash of the beginning that every edited form of the conversation shares, if any.

    It covers the task and the first answer. A history edited after them has the same hash, so one
    entry serves for all common lengths.
    """
    if session.last is None:
        return None  # an edited history is compared with the newest turn's
    roles = [str(message.get("role")) for message in session.last.prepared.client]
    length = shortest_partial(roles)
    return chain[length - 1] if length <= len(chain) else None


@dataclass(frozen=True, slots=True)
class SessionCandidate:
    """A session that may match the request."""

    id: str
    chain: tuple[int, ...]
    updated: float


def longest_whole(
    candidates: Sequence[SessionCandidate], chain: Sequence[int]
) -> SessionCandidate | None:
    """Return the candidate whose whole history is the longest prefix of ``chain``; of equals the
    latest."""
    wholes = [
        each for each in candidates if each.chain and each.chain == (*chain[: len(each.chain)],)
    ]
    return max(wholes, key=lambda each: (len(each.chain), each.updated), default=None)


def matches_of(
    candidates: Sequence[SessionCandidate], chain: Sequence[int], shortest: int
) -> tuple[HistoryMatch, ...]:
    """Return the matches, longest first; see :meth:`~..store.SessionStore.matches`."""
    whole = longest_whole(candidates, chain)
    least = max(shortest, len(whole.chain) if whole else 0)
    found = []
    for each in candidates:
        pairs = enumerate(zip(each.chain, chain, strict=False))
        most = min(len(each.chain), len(chain))
        common = next((at for at, (own, given) in pairs if own != given), most)
        if common >= least and common < len(each.chain):
            found.append(HistoryMatch(each.id, common, whole=False))
    found.sort(key=lambda match: -match.length)
    if whole is not None:
        found.append(HistoryMatch(whole.id, len(whole.chain), whole=True))
    return tuple(found)
