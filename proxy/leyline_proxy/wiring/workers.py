"""A worker's place among the processes of one proxy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..edits.policy_file import PolicyFile
from ..hub.feed import SharedFeed
from ..hub.fleet import Fleet, Reloaded
from ..hub.link import HubLink
from ..live.feed import LiveFeed
from ..telemetry.metrics import Metrics
from ..tenants import KeyFile
from ..upstream.pool import ReplicaPool


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


def build_fleet(
    link: HubLink, pool: ReplicaPool, keys: KeyFile | None, policies: PolicyFile | None
) -> Fleet:
    """Return this worker's side of what operators tell all workers."""

    def drain(name: str, draining: bool) -> None:
        replica = pool.get(name)
        if replica is not None:
            replica.draining = draining

    async def reload(order: int) -> Reloaded:
        return await reload_files(keys, policies, order)

    return Fleet(link, drain=drain, reload=reload)


async def reload_files(
    keys: KeyFile | None, policies: PolicyFile | None, order: int = 0
) -> Reloaded:
    """Reload the files of keys and policies, if they have changed."""
    return Reloaded(
        order,
        await keys.refresh() if keys is not None else None,
        keys.problem if keys is not None else None,
        await policies.refresh() if policies is not None else None,
    )
