"""The policies of a YAML file, read again when the file changes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from pathlib import Path

import structlog

from leyline_policies import Policy, PolicyError
from leyline_policies.config import PolicySet, load_policies
from leyline_policies.errors import did_you_mean

from ..telemetry.metrics import Metrics

log = structlog.get_logger("leyline.policies")

Signature = tuple[int, int, int]


class PolicyFile:
    """The policies of each tenant and model, as a file gives them.

    An unreadable or wrong file changes nothing: the last good one remains in force. Sessions
    continue, and have new policies from their next turn.

    Args:
        tenants: returns the names of the proxy's tenants; a pipeline for another one is logged.

    Raises:
        leyline_policies.PolicyError: the file is wrong at the start.
    """

    def __init__(
        self,
        path: Path,
        metrics: Metrics,
        *,
        interval_s: float = 2.0,
        tenants: Callable[[], Collection[str]] | None = None,
    ) -> None:
        self._tenants = tenants
        self._path = path
        self._metrics = metrics
        self._interval_s = interval_s
        self._signature = _signature(path)
        self._policies: PolicySet = load_policies(path)
        self._report_strangers()

    def choose(self, tenant: str, model: str) -> tuple[Policy, ...]:
        """Return the policies of a tenant and model; the same tuple until the file changes."""
        return self._policies.choose(tenant, model)

    async def run(self) -> None:
        """Check the file at intervals, forever."""
        while True:
            await asyncio.sleep(self._interval_s)
            await self.refresh()

    async def refresh(self) -> bool:
        """Read the file if it has changed; return True if its policies are now in force."""
        signature = await asyncio.to_thread(_signature, self._path)
        if signature == self._signature:
            return False
        self._signature = signature
        try:
            policies = await asyncio.to_thread(load_policies, self._path)
        except PolicyError as error:
            self._metrics.policy_reloads.labels("refused").inc()
            log.error("policies_refused", path=str(self._path), problem=str(error))
            return False
        self._policies = policies
        self._metrics.policy_reloads.labels("loaded").inc()
        log.info("policies_loaded", path=str(self._path), pipelines=len(policies.describe()))
        self._report_strangers()
        return True

    def _report_strangers(self) -> None:
        if self._tenants is None:
            return
        known = self._tenants()
        for name in self._policies.unknown_tenants(known):
            log.warning(
                "policies_unknown_tenant",
                path=str(self._path),
                named=name,
                fix=f"no tenant has this name{did_you_mean(name, known)}",
            )


def _signature(path: Path) -> Signature:
    """Return a file version's identity; editors that replace a file change its inode."""
    try:
        found = path.stat()
    except OSError:
        return (0, 0, 0)
    return (found.st_mtime_ns, found.st_size, found.st_ino)
