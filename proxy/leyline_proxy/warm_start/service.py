"""The warm start of a proxy: runs are kept, and each new engine gets its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ..upstream.pool import ReplicaPool
from ..upstream.replica import Replica
from .keeper import RunKeeper
from .sending import Replayer


class WarmStart:
    """Keeps runs and replays them, while it is running."""

    def __init__(self, keeper: RunKeeper, replayer: Replayer, pool: ReplicaPool) -> None:
        self.keeper = keeper
        self._replayer = replayer
        self._pool = pool

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Load the manifests; then write them, and watch for new engines, until the exit."""
        await self.keeper.open()
        if not self.keeper.on:
            yield
            return
        for replica in self._pool:
            replica.warms = True
        tasks = [asyncio.create_task(self.keeper.run())]
        tasks += [asyncio.create_task(self._watch(replica)) for replica in self._pool]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            await self._replayer.aclose()
            await self.keeper.close()

    async def _watch(self, replica: Replica) -> None:
        """Replay into each new run of an engine, until cancelled."""
        news = replica.handshake.news
        while True:
            news.clear()
            if replica.warming:
                await self._replayer.warm(replica)
            await news.wait()
