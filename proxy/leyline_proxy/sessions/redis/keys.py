"""Names of Redis entries: digests, so that no name of a caller's is in them.

==============  ============================================================================
``{d}:s``       a session: a hash of the fields below
``{d}:i``       its turns in flight: a hash from turn to time and store key
``w:…``         a history's digest to the session that has just this history
``a:…``         a conversation's opening to the sessions that began so, by time
``t:…``         a tenant's sessions by time of their last turn
``n:…``         the same by digest, where their number is bounded
``owners``      tenants' entries ``n:…`` by how many they list
``all``         all sessions by time of their last turn
``r:…``         a stored response
``q:…``         a tenant's stored responses by time of their last use
``responses``   tenants' entries ``q:…`` by how many they list
``state``       the epoch, runs of Redis servers, the proxies that live
==============  ============================================================================

Both entries of a session lie in one slot of a cluster, so that a script may touch both.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

VERSION, DATA, OVERVIEW, CHAIN, KEY, EPOCH, LOSSES, UPDATED = b"v d o c k e l u".split()
"""Fields of a session: version of the write, the session itself, its line in lists, its history,
its store key, the epoch of the write, losses of account since, and when it was written."""


@dataclass(frozen=True, slots=True)
class Keys:
    """Names below one prefix."""

    prefix: str

    @property
    def all(self) -> str:
        """All sessions."""
        return f"{self.prefix}:all"

    @property
    def state(self) -> str:
        """What proxies tell each other."""
        return f"{self.prefix}:state"

    def session(self, tenant: str, session_id: str) -> str:
        """A session."""
        return self.of_digest(self.digest(tenant, session_id))[0]

    def in_flight(self, tenant: str, session_id: str) -> str:
        """A session's turns in flight."""
        return self.of_digest(self.digest(tenant, session_id))[1]

    def digest(self, tenant: str, session_id: str) -> str:
        """Under which a session's entries are found."""
        return _digest("session", tenant, session_id)

    def of_digest(self, digest: str) -> tuple[str, str]:
        """Both entries of a session."""
        return f"{self.prefix}:{{{digest}}}:s", f"{self.prefix}:{{{digest}}}:i"

    def tenant(self, tenant: str) -> str:
        """A tenant's sessions."""
        return f"{self.prefix}:t:{_digest('tenant', tenant)}"

    @property
    def owners(self) -> str:
        """How many sessions tenants have."""
        return f"{self.prefix}:owners"

    def owned(self, tenant: str) -> str:
        """A tenant's sessions, by digest."""
        return f"{self.prefix}:n:{_digest('owned', tenant)}"

    def whole(self, tenant: str, key: str, value: int) -> str:
        """The session with this history."""
        return f"{self.prefix}:w:{_digest('whole', tenant, key, f'{value:x}')}"

    @property
    def responses(self) -> str:
        """How many stored responses tenants have."""
        return f"{self.prefix}:responses"

    def responses_of(self, tenant: str) -> str:
        """A tenant's stored responses."""
        return f"{self.prefix}:q:{_digest('responses', tenant)}"

    def response(self, tenant: str, response_id: str) -> str:
        """A stored response."""
        return f"{self.prefix}:r:{_digest('response', tenant, response_id)}"

    def opening(self, tenant: str, key: str, value: int) -> str:
        """Sessions with this opening."""
        return f"{self.prefix}:a:{_digest('opening', tenant, key, f'{value:x}')}"


def _digest(*parts: str) -> str:
    state = blake2b(digest_size=16)
    for part in parts:
        raw = part.encode("utf-8", "surrogatepass")
        state.update(len(raw).to_bytes(4, "little") + raw)
    return state.hexdigest()
