"""Last known states of this proxy's live claims, which an engine loses on a restart. Pure."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator

import msgspec

from leyline_engine.contract import ClaimState, ClaimStatus

MAX_CLAIMS = 4096
MAX_OF_TENANT = 256
"""Largest number of a tenant's claims; the oldest go first."""

ENGINE_RESTARTED = "engine_restarted"

ClaimKey = tuple[str, str]
"""Tenant and id."""


def key_of(status: ClaimStatus) -> ClaimKey:
    """Return a claim's tenant and id."""
    return status.claim.tenant, status.claim.id


class ClaimMemory:
    """Live claims of one run of the engine, and those lost with an earlier run."""

    def __init__(self, *, limit: int = MAX_CLAIMS, limit_of_tenant: int = MAX_OF_TENANT) -> None:
        self.instance: str | None = None
        """The engine run of these claims; None before the first."""
        self._live = _Bounded(limit, limit_of_tenant)
        self._lost = _Bounded(limit, limit_of_tenant)

    def note(self, status: ClaimStatus) -> None:
        """Record a claim's status from the engine."""
        key = key_of(status)
        self._lost.drop(key)
        if status.state.lives:
            self._live.put(status)
        else:
            self._live.drop(key)

    def missing(self, listed: Iterable[ClaimStatus]) -> bool:
        """Return True if a remembered claim is missing from a list of all live ones."""
        known = set(map(key_of, listed))
        return any(key_of(status) not in known for status in self._live)

    def update(self, listed: Iterable[ClaimStatus], *, whole: bool = True) -> None:
        """Record the live claims of the same run of the engine.

        Args:
            whole: True if the list has all of them.
        """
        if whole:
            self._live.clear()
        for status in listed:
            self.note(status)

    def restart(self, instance: str, listed: Iterable[ClaimStatus]) -> tuple[ClaimStatus, ...]:
        """Record the live claims of another run of the engine.

        Returns:
            Claims that lived in the run before and are gone, with their current status.
        """
        before = {key_of(status): status for status in self._live}
        is_first, self.instance = self.instance is None, instance
        self.update(listed)
        if is_first:
            return ()
        kept = set(map(key_of, self._live))
        gone = tuple(_harmed(status) for key, status in before.items() if key not in kept)
        for status in gone:
            self._lost.put(status)
        return gone

    def live(self) -> tuple[ClaimStatus, ...]:
        """Return the live claims, oldest first."""
        return tuple(self._live)

    def lives(self, key: ClaimKey) -> bool:
        """Return True if a claim was live when last seen."""
        return key in self._live

    def lost(self, key: ClaimKey) -> ClaimStatus | None:
        """Return a claim that was lost with an earlier run of the engine."""
        return self._lost.get(key)


class _Bounded:
    """Statuses by key, with bounds in all and per tenant."""

    def __init__(self, limit: int, limit_of_tenant: int) -> None:
        self._limit = limit
        self._limit_of_tenant = limit_of_tenant
        self._found: OrderedDict[ClaimKey, ClaimStatus] = OrderedDict()
        self._of_tenant: Counter[str] = Counter()

    def __contains__(self, key: ClaimKey) -> bool:
        return key in self._found

    def __iter__(self) -> Iterator[ClaimStatus]:
        return iter(self._found.values())

    def get(self, key: ClaimKey) -> ClaimStatus | None:
        return self._found.get(key)

    def put(self, status: ClaimStatus) -> None:
        """Store a status; a known one keeps its place."""
        tenant, _ = key = key_of(status)
        self._of_tenant[tenant] += key not in self._found
        self._found[key] = status
        if self._of_tenant[tenant] > self._limit_of_tenant:
            self.drop(next(each for each in self._found if each[0] == tenant))
        elif len(self._found) > self._limit:
            self.drop(next(iter(self._found)))

    def drop(self, key: ClaimKey) -> None:
        if self._found.pop(key, None) is not None:
            self._of_tenant[key[0]] -= 1
            if not self._of_tenant[key[0]]:
                del self._of_tenant[key[0]]

    def clear(self) -> None:
        self._found.clear()
        self._of_tenant.clear()


def _harmed(status: ClaimStatus) -> ClaimStatus:
    return msgspec.structs.replace(
        status,
        state=ClaimState.HARMED,
        cause=ENGINE_RESTARTED,
        remaining_ms=None,
        resident_tokens=0,
    )
