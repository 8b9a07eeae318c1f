"""Names of Redis entries: digests, so that they contain no caller's names.

==============  ============================================================================
``{d}:s``       a session: a hash of the fields below
``{d}:i``       its turns in flight: a hash from turn to time and store key
``w:…``         a history's digest to the session with exactly this history
``a:…``         a conversation's opening to the sessions that began so, by time
``t:…``         a tenant's sessions by time of their last turn
``n:…``         the same by digest, if their number is bounded
``owners``      tenants' entries ``n:…`` by their lengths
``all``         all sessions by time of their last turn
``r:…``         a stored response
``q:…``         a tenant's stored responses by time of their last use
``responses``   tenants' entries ``q:…`` by their lengths
``state``       the epoch, runs of Redis servers, the live proxies
==============  ============================================================================

Both entries of a session are in one slot of a cluster, so that a script may use both.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

VERSION, DATA, OVERVIEW, NAME, CHAIN, KEY, EPOCH, LOSSES, UPDATED = b"v d o n c k e l u".split()
"""Fields of a session: version of the write, the session itself, its line in lists, its history,
its store key, the epoch of the write, losses of account since, and the time of the write."""


@dataclass(frozen=True, slots=True)
class Keys:
    """Names under one prefix."""

    prefix: str

    @property
    def all(self) -> str:
        """Name of the set of all sessions."""
        return f"{self.prefix}:all"

    @property
    def state(self) -> str:
        """Name of the state that proxies share."""
        return f"{self.prefix}:state"

    def session(self, tenant: str, session_id: str) -> str:
        """Return the name of a session."""
        return self.of_digest(self.digest(tenant, session_id))[0]

    def in_flight(self, tenant: str, session_id: str) -> str:
        """Return the name of a session's turns in flight."""
        return self.of_digest(self.digest(tenant, session_id))[1]

    def digest(self, tenant: str, session_id: str) -> str:
        """Return the digest in the names of a session's entries."""
        return _digest("session", tenant, session_id)

    def of_digest(self, digest: str) -> tuple[str, str]:
        """Return the names of both entries of a session."""
        return f"{self.prefix}:{{{digest}}}:s", f"{self.prefix}:{{{digest}}}:i"

    def tenant(self, tenant: str) -> str:
        """Return the name of a tenant's sessions."""
        return f"{self.prefix}:t:{_digest('tenant', tenant)}"

    @property
    def owners(self) -> str:
        """Name of the tenants' numbers of sessions."""
        return f"{self.prefix}:owners"

    def owned(self, tenant: str) -> str:
        """Return the name of a tenant's sessions by digest."""
        return f"{self.prefix}:n:{_digest('owned', tenant)}"

    def whole(self, tenant: str, key: str, value: int) -> str:
        """Return the name of the session with this history."""
        return f"{self.prefix}:w:{_digest('whole', tenant, key, f'{value:x}')}"

    @property
    def responses(self) -> str:
        """Name of the tenants' numbers of stored responses."""
        return f"{self.prefix}:responses"

    def responses_of(self, tenant: str) -> str:
        """Return the name of a tenant's stored responses."""
        return f"{self.prefix}:q:{_digest('responses', tenant)}"

    def responses_in(self, tenant: str, session: str) -> str:
        """Return the name of the ids of a session's stored responses, by turn."""
        return f"{self.prefix}:v:{_digest('responses in', tenant, session)}"

    def response(self, tenant: str, response_id: str) -> str:
        """Return the name of a stored response."""
        return f"{self.prefix}:r:{_digest('response', tenant, response_id)}"

    def budget(self, tenant: str, window: str, begins: int) -> str:
        """Return the name of a tenant's usage in a window; see ``budgets/redis.py``."""
        return f"{self.prefix}:budget:{{{_digest('budget', tenant)}}}:{window}:{begins}"

    @property
    def carriers(self) -> str:
        """Name of the processes that carry debts; see ``debts/redis.py``."""
        return f"{self.prefix}:{{debts}}:live"

    def debts_of(self, carrier: str) -> str:
        """Return the name of a process's debts."""
        return f"{self.prefix}:{{debts}}:of:{carrier}"

    def debt(self, tenant: str, session_id: str, run: str) -> str:
        """Return the digest by which a debt is known among a process's debts."""
        return _digest("debt", tenant, session_id, run)

    def opening(self, tenant: str, key: str, value: int) -> str:
        """Return the name of the sessions with this opening."""
        return f"{self.prefix}:a:{_digest('opening', tenant, key, f'{value:x}')}"


def _digest(*parts: str) -> str:
    state = blake2b(digest_size=16)
    for part in parts:
        raw = part.encode("utf-8", "surrogatepass")
        state.update(len(raw).to_bytes(4, "little") + raw)
    return state.hexdigest()
