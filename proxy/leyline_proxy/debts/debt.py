"""One run of an engine that still has to forget a session. Names only, no text."""

from __future__ import annotations

import msgspec

DebtKey = tuple[str, str, str]
"""Tenant, session, and the engine's run."""

Owner = tuple[str, str]
"""Tenant and session."""


class Debt(msgspec.Struct, array_like=True, frozen=True):
    """A forget that a run of an engine hasn't confirmed."""

    tenant: str
    session: str
    run: str
    replica: str
    """The engine's name in the settings."""
    created: float = 0.0
    """Start of the session, in seconds since the epoch: a session with another start has expired
    meanwhile and says nothing about this debt. 0 for a debt that no session records."""

    @property
    def owner(self) -> Owner:
        """Tenant and session."""
        return self.tenant, self.session

    @property
    def key(self) -> DebtKey:
        """The name among all debts."""
        return self.tenant, self.session, self.run


class Inherited(msgspec.Struct, array_like=True, frozen=True):
    """Debts whose carriers have gone, for the process that asked."""

    debts: tuple[Debt, ...] = ()
    known: bool = True
    """False if the store had none of the asker's own debts: they must be written again."""
