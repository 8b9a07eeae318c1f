"""A session as it lies in Redis, and what is read of it. Pure."""

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
from .keys import CHAIN, DATA, EPOCH, KEY, OVERVIEW, UPDATED, VERSION
from .sealing import Seal, owner_of

STALE_S = 900.0
"""A turn that has been in flight for longer is one of a proxy that was killed: from then on it is
a loss like any other, which a forget of everything makes good."""


LOST = "lost:"
"""With a run of an engine behind it: the name of a note of where turns ran that are lost."""


class InFlight(msgspec.Struct, array_like=True, frozen=True):
    """A turn that an engine was given."""

    since: float
    """Seconds since the epoch; 0 for one that is over."""
    key: str
    """The session's store key."""
    run: str = ""
    """Of the engine; empty where that retains nothing."""
    replica: str = ""

    def note(self) -> bytes:
        """As it is stored."""
        return msgspec.msgpack.encode(self)

    @staticmethod
    def of_note(note: bytes) -> InFlight:
        """From what is stored; what can't be read is one that is over."""
        try:
            return msgspec.msgpack.decode(note, type=InFlight)
        except msgspec.MsgspecError:
            return InFlight(0.0, "")


@dataclass(frozen=True, slots=True)
class Known:
    """What one reading found."""

    tenant: str
    id: str
    version: bytes = b""
    """Empty where no account is stored."""
    session: Session | None = None
    """As it was written."""
    chain: tuple[int, ...] = ()
    key: str = ""
    extra: int = 0
    """Losses that were noted since it was written."""
    outdated: bool = False
    """It was written in another epoch, and may lack what came after."""
    in_flight: Mapping[str, InFlight] = field(default_factory=dict)

    def stale(self, now: float) -> frozenset[str]:
        """Turns in flight that nobody will settle any more."""
        return frozenset(
            name for name, turn in self.in_flight.items() if now - turn.since > STALE_S
        )

    def as_session(self, now: float, ends: str | None = None) -> Session | None:
        """The session with all that may be missing in it.

        Args:
            ends: a turn in flight that is about to be accounted for.
        """
        stale = self.stale(now)
        counted = sum(not name.startswith(LOST) for name in stale)
        losses = self.extra + self.outdated + counted
        others = frozenset(self.in_flight) - stale - {ends}
        known = self.session
        if known is None:
            if not losses and not others and not self.version:
                return None
            # Something ran that nobody can account for.
            key = self.key or next((turn.key for turn in self.in_flight.values()), "")
            known = nothing_known(self.tenant, self.id, key, now)
        # A forget has to reach whatever engine was given one of them.
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
    """Replicas by run, of all engines that were given turns of a session."""
    return {run: place.replica for run, place in session.places.items()}


def lost_places(replicas: Mapping[str, str], key: str) -> dict[str, bytes]:
    """Notes of where turns ran that are lost."""
    return {
        LOST + run: InFlight(0.0, key, run, replica).note() for run, replica in replicas.items()
    }


def text_of(raw: bytes) -> str:
    """A name as it was stored; what isn't one is read as far as it can be."""
    try:
        return raw.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return raw.decode("utf-8", "replace")


def nothing_known(tenant: str, session_id: str, key: str, now: float) -> Session:
    """A session of which an engine may hold anything."""
    return Session(session_id, tenant, key, (), (), 0, now, created=now, unnamed=1)


def fields_of(
    session: Session, chain: Sequence[int], seal: Seal, *, epoch: bytes, version: str, most: int
) -> dict[bytes, bytes | str]:
    """What is stored of a session.

    Args:
        most: bytes of a session that are stored; of a longer one only the account is, as of one
            that can't be encoded.
    """
    owner = owner_of(session.tenant, session.id)
    data = None
    if seal.hides:
        with contextlib.suppress(*UNENCODABLE):
            data = seal.close(encode_session(session), owner)
    if data is None or len(data) > most:
        data = seal.close(encode_session(session.without_text()), owner)
    return {
        VERSION: version,
        DATA: data,
        OVERVIEW: msgspec.msgpack.encode(overview(session)),
        CHAIN: array("Q", chain).tobytes(),
        KEY: session.key.encode("utf-8", "surrogatepass"),
        EPOCH: epoch,
        UPDATED: f"{session.updated:.6f}",
    }


def session_of(data: bytes | None, tenant: str, session_id: str, seal: Seal) -> Session | None:
    """The session again; None where it can't be read, or is another's."""
    record = seal.open(data or b"", owner_of(tenant, session_id))
    session = decode_session(record) if record is not None else None
    if session is None or (session.tenant, session.id) != (tenant, session_id):
        return None
    return session


def chain_of(stored: bytes | None) -> tuple[int, ...]:
    """A history again; none where that can't be read."""
    values = array("Q")
    try:
        values.frombytes(stored or b"")
    except ValueError:
        return ()
    return tuple(values)


def overview_of(stored: bytes | None) -> SessionOverview | None:
    """A line of the list again."""
    try:
        return msgspec.msgpack.decode(stored or b"", type=SessionOverview)
    except msgspec.MsgspecError:
        return None


def opening_of(session: Session, chain: Sequence[int]) -> int | None:
    """The hash of what an edited form of the conversation must begin with, once there is that.

    Task and first answer: whoever looks for this conversation by a history that was edited behind
    them has the same, so that one entry serves for all lengths in common.
    """
    if not session.turns:
        return None  # an edited history is compared with the newest turn's
    roles = [str(message.get("role")) for message in session.turns[-1].prepared.client]
    length = shortest_partial(roles)
    return chain[length - 1] if length <= len(chain) else None


@dataclass(frozen=True, slots=True)
class SessionCandidate:
    """A session that may be the one that is looked for."""

    id: str
    chain: tuple[int, ...]
    updated: float


def longest_whole(
    candidates: Sequence[SessionCandidate], chain: Sequence[int]
) -> SessionCandidate | None:
    """The one whose whole history is the longest beginning of ``chain``; of equals the latest."""
    wholes = [
        each for each in candidates if each.chain and each.chain == (*chain[: len(each.chain)],)
    ]
    return max(wholes, key=lambda each: (len(each.chain), each.updated), default=None)


def matches_of(
    candidates: Sequence[SessionCandidate], chain: Sequence[int], shortest: int
) -> tuple[HistoryMatch, ...]:
    """Matches, longest first, as :meth:`~..store.SessionStore.matches` says."""
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
