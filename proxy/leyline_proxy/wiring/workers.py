"""A worker's place among the processes of one proxy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from ..edits.policy_file import PolicyFile
from ..hub.feed import SharedFeed
from ..hub.fleet import Fleet
from ..hub.link import HubLink
from ..hub.wire import Method
from ..identity.tokens import Tokens
from ..live.feed import LiveFeed
from ..telemetry.metrics import Metrics
from ..tenants import KeyFile
from ..upstream.pool import ReplicaPool
from .tls import TlsContexts


@dataclass(frozen=True, slots=True)
class Worker:
    """One of several processes that serve a proxy's port."""

    link: HubLink
    engine_socket: Path | None = None
    """Unix socket of the embedded engine, which has a process of its own."""


def build_feed(metrics: Metrics, link: HubLink | None) -> LiveFeed:
    """Return the live page's feed, together with those of other workers."""
    if link is None:
        return LiveFeed(metrics.live_viewers)
    peers = SharedFeed(link)
    feed = LiveFeed(metrics.live_viewers, peers=peers)
    peers.connect(feed)
    return feed


class Reloaded(msgspec.Struct, frozen=True):
    """The result of reloading the files; None for a file that there isn't."""

    keys: bool | None = None
    """True if the file of keys had changed and was loaded."""
    problem: str | None = None
    """The reason that the file of keys can't be loaded."""
    policies: bool | None = None
    tls: bool | None = None
    tls_problem: str | None = None
    identity: bool | None = None
    """True if an identity provider's keys were read, whether they had changed or not."""
    identity_problem: str | None = None


RELOAD = Method("files.reload", type(None), Reloaded)


class Files:
    """The files of keys, policies and certificates, and the keys of an identity provider, at this
    worker and at all others."""

    def __init__(
        self,
        keys: KeyFile | None,
        policies: PolicyFile | None,
        fleet: Fleet | None,
        tls: TlsContexts,
        tokens: Tokens | None,
    ) -> None:
        self._keys = keys
        self._policies = policies
        self._tls = tls if any(tls) else None
        self._identity = tokens.keys if tokens is not None else None
        self._fleet = fleet
        if fleet is not None:
            fleet.follow(RELOAD, lambda _: self._reload())

    async def reload(self) -> Reloaded:
        """Reload what has changed. Of several workers, any counts."""
        if self._fleet is None:
            return await self._reload()
        found = await self._fleet.everyone(RELOAD, None)
        return Reloaded(
            any(each.keys for each in found) if self._keys is not None else None,
            next((each.problem for each in found if each.problem is not None), None),
            any(each.policies for each in found) if self._policies is not None else None,
            any(each.tls for each in found) if self._tls is not None else None,
            next((each.tls_problem for each in found if each.tls_problem is not None), None),
            all(each.identity for each in found) if self._identity is not None else None,
            next((each.identity_problem for each in found if each.identity_problem), None),
        )

    async def _reload(self) -> Reloaded:
        keys, policies, tls = self._keys, self._policies, self._tls
        identity = self._identity
        if identity is not None:
            await identity.look()
        return Reloaded(
            await keys.refresh() if keys is not None else None,
            keys.problem if keys is not None else None,
            await policies.refresh() if policies is not None else None,
            await tls.refresh() if tls is not None else None,
            tls.problem if tls is not None else None,
            identity.problem is None if identity is not None else None,
            identity.problem if identity is not None else None,
        )


def build_fleet(link: HubLink, pool: ReplicaPool) -> Fleet:
    """Return this worker's side of what operators tell all workers."""

    def drain(name: str, draining: bool) -> None:
        replica = pool.get(name)
        if replica is not None:
            replica.draining = draining

    return Fleet(link, drain=drain)
