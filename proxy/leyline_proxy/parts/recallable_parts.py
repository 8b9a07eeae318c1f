"""Evicted texts as turns use them: with forgets that the store still owes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import structlog

from leyline_engine.contract import ProofPlace
from leyline_policies.recall import address_of

from ..model.parts import Barred, FoundParts, PartFacts, StoredPart
from ..telemetry.logging import frames_of
from .limits import MAX_FORGOTTEN, Owner, PartStoreError
from .marks import NOTHING, Mark, WrittenMark, joined
from .space import PartUsage
from .store import PartStore

log = structlog.get_logger("leyline.recall")

PLACE = "parts"
"""Name of the store in proofs."""

MAX_OWED = 4096
"""Sessions of one tenant whose forgets are remembered until the store takes them."""

_RETRY_S = 1.0
_TIDY_S = 3600.0


@dataclass(frozen=True, slots=True)
class _Debt:
    """Forgets of one session that the store doesn't know yet."""

    demands: int = NOTHING
    """The session's demands before the forget; :data:`NOTHING` if only its deletion is owed."""
    turn: str = ""
    deleted: bool = False
    barred: frozenset[str] = frozenset()
    """Addresses that the session has forgotten for good."""
    closed: bool = False
    """True if it has forgotten more for good than can be named."""
    before: int = 0
    """The session's demands before the first of them."""


class RecallableParts:
    """The texts that can be recalled; text that forgets must reach.

    A forget that the store can't take now is remembered here. Until the store has it, nothing of
    its session can be recalled, or stored. If the process ends before, the session's own number of
    demands protects its texts, for as long as the session store has it: nothing of a session that
    has demanded a forget can be recalled if the store remembers none.
    """

    def __init__(self, store: PartStore, *, retry_s: float = _RETRY_S) -> None:
        self._store = store
        self._retry_s = retry_s
        self._owed: dict[Owner, _Debt] = {}

    @property
    def name(self) -> str:
        """Kind of the store."""
        return self._store.name

    @property
    def problem(self) -> str | None:
        """The reason that nothing can be stored or recalled now; None if it can."""
        return self._store.problem

    @property
    def usage(self) -> PartUsage:
        """The contents of the store in this process."""
        return self._store.usage

    @property
    def owed(self) -> int:
        """Number of sessions with forgets that the store doesn't know yet."""
        return len(self._owed)

    async def put(self, owner: Owner, parts: Sequence[StoredPart]) -> None:
        """Store texts; see :meth:`~.store.PartStore.put`.

        Raises:
            PartStoreError: nothing, or not everything, was stored.
        """
        await self._pay(owner)
        await self._store.put(owner, parts)

    async def get(self, owner: Owner, addresses: Collection[str], *, demands: int) -> FoundParts:
        """Return the state of addresses.

        Args:
            demands: the session's demands, as the session store has them.

        Raises:
            PartStoreError: the store can't be read, or still owes a forget of the session.
        """
        await self._pay(owner)
        found = await self._store.get(owner, addresses)
        lost = await self._lost(owner, demands)
        parts = {
            name: part for name, part in found.parts.items() if part.level >= demands and not lost
        }
        if owner in self._owed:
            raise PartStoreError("a forget of this session is under way")
        return FoundParts(parts, found.forgotten | (found.parts.keys() - parts.keys()))

    async def listed(self, owner: Owner, *, demands: int) -> Sequence[PartFacts]:
        """Return what a session has, oldest first; for arguments and errors see :meth:`get`."""
        await self._pay(owner)
        found = await self._store.listed(owner)
        if await self._lost(owner, demands):
            found = ()
        if owner in self._owed:
            raise PartStoreError("a forget of this session is under way")
        return [each for each in found if each.level >= demands]

    async def barred(self, owner: Owner, *, demands: int) -> Barred:
        """Return the addresses that a session has forgotten for good; for arguments and errors see
        :meth:`get`."""
        await self._pay(owner)
        found = await self._store.barred(owner)
        if owner in self._owed:
            raise PartStoreError("a forget of this session is under way")
        return replace(found, everything=found.everything or (demands > 0 and not found.known))

    async def bar(self, owner: Owner, texts: Collection[str] | None, *, demands: int) -> None:
        """Refuse texts of a session for good, now or as soon as the store can. Never raises.

        Args:
            texts: None for all texts.
            demands: the session's demands so far.
        """
        known = self._owed.get(owner, _Debt(before=demands))
        barred = known.barred.union(map(address_of, texts or ()))
        closed = known.closed or texts is None or len(barred) > MAX_FORGOTTEN
        self._owe(owner, replace(known, barred=frozenset() if closed else barred, closed=closed))
        await self._try(owner)

    async def _lost(self, owner: Owner, demands: int) -> bool:
        """Return True if a session has demanded forgets of which the store knows none."""
        return demands > 0 and not (await self._store.barred(owner)).known

    async def forget(self, tenant: str, session: str, turn: str, demands: int) -> None:
        """Remove all of a session's texts, now or as soon as the store can."""
        owner = (tenant, session)
        known = self._owed.get(owner, _Debt(before=demands))
        old = WrittenMark(0.0, Mark(known.demands, known.turn))
        mark = joined(Mark(demands, turn), (old,), 0.0)
        self._owe(owner, replace(known, demands=mark.demands, turn=mark.turn))
        await self._try(owner)

    async def delete(self, tenant: str, session: str) -> None:
        """Remove all of a session that is deleted, now or as soon as the store can."""
        self._owe((tenant, session), _Debt(deleted=True))
        await self._try((tenant, session))

    async def left(self, tenant: str, session: str, demands: int) -> Sequence[ProofPlace]:
        """Look for a session's texts in the store."""
        owner = (tenant, session)
        try:
            await self._pay(owner)
            scanned, survivors = await self._store.held(owner, demands)
        except PartStoreError as error:
            return (ProofPlace(place=PLACE, unscanned=str(error)),)
        return (ProofPlace(place=PLACE, scanned=scanned, survivors=survivors),)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Pay debts until the exit, which closes the store's connections."""
        await self._store.check()
        task = asyncio.create_task(self.run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait((task,))
            await self._store.aclose()

    async def run(self) -> None:
        """Pay debts, look if the store is back, and remove what has expired, until cancelled."""
        loop = asyncio.get_running_loop()
        tidied = loop.time()
        try:
            while True:
                await asyncio.sleep(self._retry_s)
                if self._store.problem is not None:
                    await self._store.check()
                for owner in tuple(self._owed):
                    if self._store.problem is None:
                        await self._try(owner)
                if loop.time() - tidied > _TIDY_S:
                    tidied = loop.time()
                    await self._store.tidy()
        finally:
            if self._owed:
                log.warning("recall_forgets_owed_at_stop", sessions=len(self._owed))

    def _owe(self, owner: Owner, debt: _Debt) -> None:
        self._owed[owner] = debt
        if len(self._owed) <= MAX_OWED:
            return
        own = [each for each in self._owed if each[0] == owner[0]]
        if len(own) > MAX_OWED:
            # From here on the session's number of demands alone protects its texts.
            del self._owed[own[0]]
            log.error("recall_forget_dropped", fix="look why the store of recall_store is down")

    async def _try(self, owner: Owner) -> None:
        try:
            await self._pay(owner)
        except PartStoreError:
            log.warning("recall_forget_owed", sessions=len(self._owed))
        except Exception as error:  # the debt stays, and is tried again
            log.error("recall_forget_failed", error=type(error).__name__, frames=frames_of(error))

    async def _pay(self, owner: Owner) -> None:
        """Carry what is owed.

        Raises:
            PartStoreError: it is still owed.
        """
        while (debt := self._owed.get(owner)) is not None:
            if debt.deleted:
                await self._store.delete(owner)
            # What it barred is unknown if it has lost the marks of earlier forgets.
            lost = not debt.deleted and await self._lost(owner, debt.before)
            if debt.barred or debt.closed or lost:
                closed = debt.closed or lost
                await self._store.bar(owner, None if closed else debt.barred)
            if debt.demands != NOTHING:
                await self._store.forget(owner, turn=debt.turn, demands=debt.demands)
            if self._owed.get(owner) is debt:
                del self._owed[owner]
