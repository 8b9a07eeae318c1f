"""Runs of sessions, kept as turns settle, and their manifests.

A forget removes a session's run from memory and from the disk before its turn goes to an engine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import structlog

from leyline_engine.contract import ProofPlace

from ..model.session import Session
from ..request.identify import NAMED
from ..telemetry.logging import frames_of
from ..telemetry.metrics import Metrics
from ..tenants import TenantDirectory
from ..turns.ports import TurnObserver
from ..turns.settled import SettledTurn
from .book import RunBook
from .folder import FolderLockedError
from .manifests import Change, Manifests, Written
from .runs import EngineIdentity, FileResult, Group, Outcome, Run

log = structlog.get_logger("leyline.warm_start")

DISK_S = 5.0
"""Longest wait for the disk; its work goes on."""

_OFF = "the folder of the warm start could not be used"

T = TypeVar("T")


class RunKeeper(TurnObserver):
    """Keeps the run of each recently active session. An observer of turns, and the memory of text
    that forgets must reach.

    Args:
        load_s: time limit for reading the manifests at the start.
        ttl_s: time after which the run of an idle session is dropped.
        interval_s: time between two looks for changed manifests.
    """

    def __init__(
        self,
        book: RunBook,
        manifests: Manifests,
        tenants: TenantDirectory,
        metrics: Metrics,
        *,
        load_s: float,
        ttl_s: float,
        interval_s: float,
        disk_s: float = DISK_S,
    ) -> None:
        self._book = book
        self._manifests = manifests
        self._tenants = tenants
        self._metrics = metrics
        self._load_s = load_s
        self._ttl_s = ttl_s
        self._interval_s = interval_s
        self._disk_s = disk_s
        # One thread: what was begun later is done later, even if nobody waits for it any more.
        self._disk = ThreadPoolExecutor(1, "warm-start")
        nothing: Future[Any] = Future()
        nothing.set_result(None)
        self._given_up = nothing, 0.0
        """Work that nobody waits for any more and that may still be done, and its time limit."""
        self._writing = asyncio.Lock()
        self._written: dict[Group, Written] = {}
        self._stale = asyncio.Event()
        """Set if a manifest holds what it shouldn't."""
        self.on = False
        """True while runs are kept."""
        self._unsure = False
        """True if the folder may hold manifests, and can't be used."""

    async def open(self) -> None:
        """Take the folder, and load its manifests. Trouble switches the warm start off."""
        try:
            found = await self._on_disk(
                partial(self._manifests.load, self._load_s), self._load_s + self._disk_s
            )
        except Exception as error:  # the proxy starts all the same
            self._unsure = not isinstance(error, FolderLockedError)
            log.error("warm_start_off", error=type(error).__name__)
            return
        self.on = True
        runs: list[Run] = []
        for each in found:
            outcome = self._refusal(each.found)
            if isinstance(each.found, Outcome) or outcome is not None:
                self._metrics.warm_start_runs.labels(outcome).inc()
                log.warning("manifest_unused", outcome=outcome, manifest=each.name)
                await self._remove(each.name)
                continue
            group, held = each.found
            self._written[group] = Written.of(held)
            runs += held
        for run in sorted(runs, key=lambda run: run.at):
            self._book.keep(run)

    def _refusal(self, found: tuple[Group, tuple[Run, ...]] | Outcome) -> Outcome | None:
        if isinstance(found, Outcome):
            return found
        tenant = self._tenants.get(found[0].tenant)
        if tenant is None:
            return Outcome.OTHER_TENANT
        return None if tenant.warm_start else Outcome.SWITCHED_OFF

    async def run(self) -> None:
        """Write changed manifests until cancelled."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._interval_s):
                    await self._stale.wait()
            self._stale.clear()
            await self.write()

    async def close(self) -> None:
        """Write what has changed, and give the folder back."""
        if self.on:
            await self.write()
            self.on = False
            with suppress(TimeoutError):
                await self._on_disk(self._manifests.folder.release, self._disk_s)
        self._disk.shutdown(wait=False)

    def settled(self, settled: SettledTurn, session: Session) -> None:
        """Keep a turn's prompt."""
        turn = settled.turn
        if not self.on or not turn.request.tenant.warm_start:
            return
        owner = (session.tenant, session.id)
        known = self._book.get(owner)
        if known is not None and known.demands != session.demands:
            # Another proxy may have demanded it.
            self._book.drop(owner)
            self._stale.set()
        # A policy's question is its turn's prompt again, and may end after the next turn.
        run = run_of(settled, session) if turn.asks is None else None
        if run is not None:
            self._book.settle(run, turn.name, turn.demands)

    async def forget(self, tenant: str, session: str, turn: str, demands: int) -> None:
        """Remove a session's run from memory and from the disk, and keep none of the turns that
        were planned before."""
        if self.on:
            self._book.forget((tenant, session), turn, demands)
            await self._remove_session(tenant, session)
        elif self._unsure:
            self._count(FileResult.LEFT)

    async def left(self, tenant: str, session: str, demands: int) -> Sequence[ProofPlace]:
        """Look for a session's runs in memory and in the manifests."""
        if not self.on:
            return (ProofPlace(place="manifests", unscanned=_OFF),) if self._unsure else ()
        held = tuple(self._book)
        memory = _proof_place("warm_start", held, (tenant, session), demands)
        try:
            async with self._writing:
                work = partial(self._manifests.look, self._disk_s)
                found, unread = await self._on_disk(work, self._disk_s)
        except Exception as error:  # the proof says so
            return memory, ProofPlace(place="manifests", unscanned=type(error).__name__)
        disk = _proof_place("manifests", found, (tenant, session), demands)
        if unread:
            why = f"{unread} manifests could not be read"
            disk = ProofPlace(place="manifests", scanned=len(found), unscanned=why)
        return memory, disk

    async def delete(self, tenant: str, session: str) -> None:
        """Remove a session's run from memory and from the disk."""
        if self.on:
            self._book.drop((tenant, session))
            await self._remove_session(tenant, session)

    async def _remove_session(self, tenant: str, session: str) -> None:
        # Waits for a manifest that is being written, which may hold the run.
        async with self._writing:
            held = [
                group
                for group, written in self._written.items()
                if group.tenant == tenant and session in written.sessions
            ]
            if held:
                await self._change(held)

    async def write(self) -> None:
        """Write the manifests that have changed."""
        self._book.expire(time.time() - self._ttl_s)
        for name in {run.tenant for run in self._book}:
            tenant = self._tenants.get(name)
            if tenant is None or not tenant.warm_start:
                self._book.drop_tenant(name)
        async with self._writing:
            await self._change()

    async def _change(self, only: Collection[Group] = ()) -> None:
        runs = tuple(self._book)
        work = partial(self._manifests.change, runs, dict(self._written), only)
        try:
            changes = await self._on_disk(work, self._disk_s)
        except asyncio.CancelledError:
            self._doubt(runs)
            raise
        except Exception as error:  # no turn fails because of its cache
            self._doubt(runs)
            log.error("manifest_change_failed", error=type(error).__name__, frames=frames_of(error))
            self._count(FileResult.LEFT if only else FileResult.FAILED)
            return
        for change in changes:
            self._account(change)

    def _doubt(self, runs: Iterable[Run]) -> None:
        """Take it that the disk may hold each of these runs, now or later."""
        for run in runs:
            known = self._written.get(run.group, Written())
            self._written[run.group] = Written((), known.sessions | {run.session})

    def _account(self, change: Change) -> None:
        self._count(change.result)
        if change.written is not None:
            self._written[change.group] = change.written
        else:
            self._written.pop(change.group, None)

    def _count(self, result: FileResult) -> None:
        self._metrics.warm_start_files.labels(result).inc()
        if result is FileResult.LEFT:
            log.error(
                "manifest_left", fix="delete the files *.warm in the folder of the warm start"
            )
        elif result is FileResult.FAILED:
            log.warning("manifest_not_written")

    async def _remove(self, name: str) -> None:
        try:
            self._count(await self._on_disk(partial(self._manifests.remove, name), self._disk_s))
        except TimeoutError:
            self._count(FileResult.LEFT)

    async def _on_disk(self, work: Callable[[], T], seconds: float) -> T:
        """Return the result of blocking work.

        Raises:
            TimeoutError: it isn't there in time, or earlier work still hangs.
        """
        earlier, end = self._given_up
        if not earlier.done():
            with suppress(Exception):
                async with asyncio.timeout(end - time.monotonic()):
                    await asyncio.wrap_future(earlier)
            if not earlier.done():
                raise TimeoutError
        future, end = self._disk.submit(work), time.monotonic() + seconds
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.wrap_future(future)
        except BaseException:
            self._given_up = future, end
            raise


def _proof_place(
    name: str, runs: Collection[Run], owner: tuple[str, str], demands: int
) -> ProofPlace:
    own = [run for run in runs if run.owner == owner]
    again = sum(run.demands >= demands for run in own)
    return ProofPlace(place=name, scanned=len(runs), survivors=len(own) - again, sent_again=again)


def run_of(settled: SettledTurn, session: Session) -> Run | None:
    """Return the run of a settled turn; None if its prompt can't be replayed, or shouldn't.

    Args:
        session: its state after the turn.
    """
    turn, source = settled.turn, settled.source
    status, plan = turn.status, turn.planned.plan
    capability = status.capability
    if capability is None or source is None or not turn.enveloped:
        return None
    demands = turn.demands + bool(plan.forgets)
    replayable = (
        bool(status.rendering.fingerprint)
        and len(source.rendered.tokens) > 0
        # An adapter's KV is another one.
        and turn.request.computed_by == capability.model
        and settled.run == status.retains_as
    )
    if not replayable or session.demands != demands:
        return None
    return Run(
        tenant=session.tenant,
        session=session.id,
        identity=EngineIdentity(
            capability.model, capability.model_fingerprint, status.rendering.fingerprint
        ),
        tokens=source.rendered.tokens,
        spans=plan.spans,
        engine=settled.run,
        demands=demands,
        since=session.created,
        named=session.key == NAMED == turn.identity.key,
        at=time.time(),
    )
