"""Limits on what a tenant, and all tenants together, may claim. Pure."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from dataclasses import dataclass, replace

from leyline_engine.contract import Claim, ClaimError

from .protection import ClaimKey


class ClaimRefusedError(ClaimError):
    """The book won't take a well-formed claim; ``field`` is the limit or the field."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one engine's book. Tokens are whole pages, by the predicates' required share."""

    claims: int = 64
    """Maximum number of live claims of a tenant."""
    tokens: int = 1_000_000
    """Maximum number of tokens that a tenant claims, softly or hard."""
    share: float = 0.5
    """Maximum share of the pool that a tenant claims hard."""
    engine_claims: int = 4096
    engine_share: float = 0.9
    """Maximum share of the pool that all tenants together claim hard; the rest is for requests."""


@dataclass(slots=True)
class Usage:
    """The claimed amounts, of one tenant or of all."""

    claims: int = 0
    pages: int = 0
    hard_pages: int = 0

    def add(self, claim: Claim, pages: int, sign: int = 1) -> None:
        """Count a claim; with sign -1, discount it."""
        self.claims += sign
        self.pages += sign * pages
        self.hard_pages += sign * pages * claim.hard


class Accounts:
    """The usage of live claims, their deadlines, and the sessions that they keep from admission."""

    def __init__(self, usable: int, page_size: int) -> None:
        self._usable = usable
        self._page_size = page_size
        self._tenants: dict[str, Usage] = {}
        self._engine = Usage()
        self._deadlines: list[tuple[int, ClaimKey]] = []
        self._no_admit: Counter[tuple[str, str]] = Counter()

    def add(self, claim: Claim, required: int, deadline_ms: int | None) -> None:
        """Add a claim that begins to live."""
        self._tenants.setdefault(claim.tenant, Usage()).add(claim, required)
        self._engine.add(claim, required)
        if deadline_ms is not None:
            insort(self._deadlines, (deadline_ms, (claim.tenant, claim.id)))
        self._no_admit[claim.tenant, claim.session] += claim.write_no_admit

    def remove(self, claim: Claim, required: int, deadline_ms: int | None) -> None:
        """Remove a claim that ended or is replaced; with the arguments of its :meth:`add`."""
        tenant = self._tenants[claim.tenant]
        tenant.add(claim, required, -1)
        self._engine.add(claim, required, -1)
        if not tenant.claims:
            del self._tenants[claim.tenant]
        if deadline_ms is not None:
            entry = (deadline_ms, (claim.tenant, claim.id))
            del self._deadlines[bisect_left(self._deadlines, entry)]
        session = (claim.tenant, claim.session)
        self._no_admit[session] -= claim.write_no_admit
        if not self._no_admit[session]:
            del self._no_admit[session]

    def due(self, now_ms: int) -> ClaimKey | None:
        """Return the live claim with the earliest deadline, if that has come."""
        if self._deadlines and self._deadlines[0][0] <= now_ms:
            return self._deadlines[0][1]
        return None

    @property
    def next_deadline_ms(self) -> int | None:
        """The earliest deadline of a live claim."""
        return self._deadlines[0][0] if self._deadlines else None

    def admits(self, tenant: str, session: str) -> bool:
        """Return True if no live claim of the session keeps its KV from being admitted."""
        return not self._no_admit[tenant, session]

    def check(
        self, limits: Limits, claim: Claim, required: int, replaced: tuple[Claim, int] | None
    ) -> None:
        """Refuse a claim that would exceed a limit.

        Args:
            required: pages that must be resident.
            replaced: the revision that it would replace, and the pages of that.

        Raises:
            ClaimRefusedError: names the limit.
        """
        tenant = replace(self._tenants.get(claim.tenant, Usage()))
        engine = replace(self._engine)
        for usage in (tenant, engine):
            usage.add(claim, required)
            if replaced is not None:
                usage.add(*replaced, -1)
        of_tenant = int(limits.share * self._usable)
        of_engine = int(limits.engine_share * self._usable)
        tokens = tenant.pages * self._page_size
        for name, value, bound, told in (
            ("claims", tenant.claims, limits.claims, "live claims of a tenant"),
            ("tokens", tokens, limits.tokens, "tokens claimed by a tenant"),
            ("share", tenant.hard_pages, of_tenant, "pages claimed hard by a tenant"),
            ("engine_claims", engine.claims, limits.engine_claims, "live claims on this engine"),
            ("engine_share", engine.hard_pages, of_engine, "pages claimed hard on this engine"),
        ):
            if value > bound:
                # The caller may not know how much others claim.
                mine = "" if name.startswith("engine") else f"; this one would make it {value}"
                raise ClaimRefusedError(name, f"at most {bound} {told}{mine}")
