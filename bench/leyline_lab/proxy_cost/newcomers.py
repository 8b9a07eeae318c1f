"""The wait of a new connection while the proxy has all the work that it can do.

Residents stream on connections of their own, without a pause, until the proxy's core is full.
Meanwhile newcomers come one by one, each on a new connection: sessions that nobody has seen, and
requests for ``/healthz``, as an orchestrator sends them. Each event loop has its turns in a run.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain
from time import perf_counter
from typing import Any

from ..console import write_json
from ..harness.arguments import Arguments
from ..harness.report import progress, show
from ..harness.statistics import percentile
from .agent import renderer_document
from .load import Client, Session, canned
from .systems import System, leyline

EVERY_S = 0.25
"""Seconds between two newcomers."""
TURNS = 8
"""Turns of a resident's session; the next one begins on the same connection."""


@dataclass
class Seen:
    """Measurements of one loop's turns, in seconds to the first byte."""

    residents: list[float] = field(default_factory=list)
    newcomers: list[float] = field(default_factory=list)
    health: list[float] = field(default_factory=list)
    wall_s: float = 0.0
    cpu_s: float = 0.0


@dataclass(frozen=True)
class Crowd:
    """The load."""

    residents: int
    seconds: float
    chunks: int


class Run:
    """One turn of one system."""

    def __init__(self, system: System, make: Callable[[], Session], crowd: Crowd) -> None:
        self._system, self._make, self._crowd = system, make, crowd
        self._until = 0.0
        self.seen = Seen()

    async def measure(self) -> Seen:
        """Open all residents' connections, then measure."""
        clients = [Client(self._system.origin) for _ in range(self._crowd.residents)]
        try:
            for first in range(0, len(clients), 16):
                few = clients[first : first + 16]
                await asyncio.gather(*(self._ask(client, self._make()) for client in few))
            begun, cpu = perf_counter(), self._system.cpu_s()
            self._until = begun + self._crowd.seconds
            async with asyncio.TaskGroup() as group:
                for client in clients:
                    group.create_task(self._reside(client))
                for kind in (self._come, self._look):
                    group.create_task(self._one_by_one(group, kind))
            self.seen.wall_s = perf_counter() - begun
            self.seen.cpu_s = self._system.cpu_s() - cpu
        finally:
            await asyncio.gather(*(client.aclose() for client in clients))
        return self.seen

    async def _ask(self, client: Client, session: Session) -> float:
        await client.post(session.next_request(stream=True, chunks=self._crowd.chunks))
        return client.first_s

    async def _reside(self, client: Client) -> None:
        while perf_counter() < self._until:
            session = self._make()
            for _ in range(TURNS):
                self.seen.residents.append(await self._ask(client, session))
                if perf_counter() >= self._until:
                    return

    async def _one_by_one(self, group: asyncio.TaskGroup, kind: Callable[[], Any]) -> None:
        while perf_counter() < self._until:
            group.create_task(kind())
            await asyncio.sleep(EVERY_S)

    async def _come(self) -> None:
        client = Client(self._system.origin)
        try:
            self.seen.newcomers.append(await self._ask(client, self._make()))
        finally:
            await client.aclose()

    async def _look(self) -> None:
        begun = perf_counter()
        host, _, port = self._system.origin.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f"GET /healthz HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n"
        writer.write(head.encode())
        if not (await reader.read()).startswith(b"HTTP/1.1 200"):
            raise RuntimeError("the proxy isn't healthy")
        self.seen.health.append(perf_counter() - begun)
        writer.close()


def figures(turns: Sequence[Seen]) -> dict[str, float]:
    """Return one loop's figures over all its turns."""
    found: dict[str, float] = {}
    requests = sum(len(each.residents) + len(each.newcomers) for each in turns)
    found["requests_per_s"] = round(requests / sum(each.wall_s for each in turns), 1)
    found["cpu_ms_per_request"] = round(1e3 * sum(each.cpu_s for each in turns) / requests, 2)
    for name in ("residents", "newcomers", "health"):
        seconds = list(chain.from_iterable(getattr(each, name) for each in turns))
        found[f"{name}_p50_s"] = round(percentile(seconds, 0.5), 3)
        found[f"{name}_p99_s"] = round(percentile(seconds, 0.99), 3)
    return found


def run_all(given: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Measure each loop in turn: ABAB."""
    crowd = Crowd(given.connections, given.seconds, given.chunks)
    loops = given.loops.split()
    seen: dict[str, list[Seen]] = {loop: [] for loop in loops}
    with canned(renderer_document()) as made, ExitStack() as stack:
        url, sessions = stack.enter_context(made.upstream()).origin, made.sessions(given.tokens)
        systems = [
            stack.enter_context(leyline(loop, url, made.logs, LEYLINE_LOOP=loop)) for loop in loops
        ]
        step = stack.enter_context(progress("turns", given.rounds * len(systems)))
        for _ in range(given.rounds):
            for system in systems:
                run = Run(system, sessions.make, crowd)
                seen[system.name].append(asyncio.run(run.measure()))
                step()
    return {loop: figures(turns) for loop, turns in seen.items()}


def main() -> None:
    """Measure, print, write."""
    parser = Arguments(__doc__)
    parser.add_argument("--connections", type=int, default=200, help="residents")
    parser.add_argument("--seconds", type=float, default=15.0, help="of a turn")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each loop")
    parser.add_argument("--tokens", type=int, default=1000, help="of the first prompts")
    parser.add_argument("--chunks", type=int, default=64, help="of a stream")
    parser.add_argument("--loops", default="uvloop asyncio", help="event loops to compare")
    given = parser.parse_args()
    results = run_all(given)
    write_json(given.json, results)
    names = next(iter(results.values()))
    rows = [[name, *(f"{each[name]:g}" for each in results.values())] for name in names]
    show(("", *results), rows, title="Seconds to the first byte")
