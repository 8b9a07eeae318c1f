"""Half an hour of agents, as a test that memory stays flat and every request is answered.

The proxy runs in a process of its own in front of an engine in another. Sessions talk side by side:
each turn appends a call and a result; the proxy's policies shorten old results and redact keys; now
and then a session changes its own history, goes back a few turns, or hangs up in the middle of a
stream. After some turns a session ends and a new one takes its place, so the store fills up, and
from then on every session that comes pushes one out. The memory of texts is bounded so that it is
full early, too.

Flat means: over the second half of the run, a line through the proxy's resident memory rises by no
more than ``--tolerance`` of it. A request that isn't answered with 200 fails the run, too.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import httpx

from ..harness.arguments import Arguments
from ..harness.machine import free_port, memory_mib
from ..harness.report import Step, progress
from ..pictures import new_figure, save_figure
from ..proxy_cost.systems import System, leyline, python, running
from .outcome import report, text

CHAT = "/v1/chat/completions"
POLICY = r"truncate_older_than:n=3,max_chars=120 | redact:pattern='key-\d+',replacement='[key]'"
TURNS = 16
"""Turns of a session, before another takes its place."""

STORED = 64
"""Sessions that the store may hold, so that it is full early in the run."""

TEXT_MEMORY_MB = 48
"""Bound of the proxy's memory of texts; the default would take longer than the run to fill."""

SAMPLE_S = 2.0


@dataclass
class Tally:
    """Counts of a run."""

    statuses: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    rss_mb: list[tuple[float, float]] = field(default_factory=list)
    """Seconds since the start, and the proxy's resident memory then."""


@contextmanager
def stack() -> Iterator[System]:
    """Run an engine, and yield a proxy in front of it."""
    port = free_port()
    engine = python("leyline_lab.soaks.engine", str(port))
    settings = {
        "LEYLINE_POLICY": POLICY,
        "LEYLINE_LOG_LEVEL": "error",
        "LEYLINE_MAX_SESSIONS": str(STORED),
        "LEYLINE_TEXT_MEMORY_BYTES": str(TEXT_MEMORY_MB << 20),
    }
    with (
        tempfile.TemporaryDirectory() as folder,
        running("engine", engine, port, "/v1/models", Path(folder) / "engine.log") as upstream,
        leyline("proxy", upstream.origin, Path(folder), **settings) as proxy,
    ):
        yield proxy


class Agent:
    """A place in which session follows session."""

    def __init__(self, http: httpx.AsyncClient, model: str, tally: Tally, seed: int) -> None:
        self._http, self._model, self._tally = http, model, tally
        self._rng = Random(seed)
        self._name = f"soak-{seed}"
        self._sessions = 0

    async def run(self, until: float) -> None:
        """Talk until the time is over."""
        while time.monotonic() < until:
            self._sessions += 1
            await self._session(f"{self._name}-{self._sessions}", until)

    async def _session(self, session: str, until: float) -> None:
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": "You look into folders. " * 4},
            {"role": "user", "content": f"{session}: {text(self._rng, 30)}"},
        ]
        for turn in range(TURNS):
            if time.monotonic() > until:
                return
            await self._turn(session, messages)
            function = {"name": "shell", "arguments": json.dumps({"command": text(self._rng, 3)})}
            call = {"id": f"c{turn}", "type": "function", "function": function}
            result = f"{text(self._rng, self._rng.randint(10, 80))} key-{self._rng.randint(1, 999)}"
            messages += [
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": call["id"], "content": result},
            ]
            self._meddle(messages)

    def _meddle(self, messages: list[dict[str, Any]]) -> None:
        """Change a history as harnesses do now and then."""
        chance, pairs = self._rng.random(), (len(messages) - 2) // 2
        if chance < 0.1 and pairs > 2:
            messages[3] = {**messages[3], "content": text(self._rng, 5)}
        elif chance < 0.15 and pairs > 4:
            del messages[-4:]

    async def _turn(self, session: str, messages: list[dict[str, Any]]) -> None:
        streamed = self._rng.random() < 0.5
        leaves = streamed and self._rng.random() < 0.1
        body = {"model": self._model, "messages": messages, "max_tokens": 3, "stream": streamed}
        headers = {"x-leyline-session": session}
        try:
            async with self._http.stream("POST", CHAT, json=body, headers=headers) as answer:
                status = str(answer.status_code)
                if leaves:
                    await anext(answer.aiter_raw())
                    status = "left"
                elif streamed:
                    text = (await answer.aread()).decode()
                    status = status if text.endswith("[DONE]\n\n") else "torn"
                else:
                    document = json.loads(await answer.aread())
                    self._tally.outcomes[document["leyline"]["outcome"]] += 1
        except (httpx.HTTPError, KeyError, ValueError) as error:
            status = type(error).__name__
        self._tally.statuses[status] += 1


async def watch(pid: int, tally: Tally, seconds: float, step: Step) -> None:
    """Note the proxy's memory until the time is over."""
    started = time.monotonic()
    while (passed := time.monotonic() - started) < seconds:
        tally.rss_mb.append((passed, memory_mib(pid)))
        await asyncio.sleep(SAMPLE_S)
        step(advance=SAMPLE_S)


def growth(rss_mb: list[tuple[float, float]]) -> tuple[float, float]:
    """Return the rise of a line through the second half, and the half's mean; both in MB."""
    half = rss_mb[len(rss_mb) // 2 :]
    times, sizes = zip(*half, strict=True)
    slope = statistics.linear_regression(times, sizes).slope
    return slope * (times[-1] - times[0]), statistics.fmean(sizes)


def draw(path: Path, tally: Tally) -> None:
    """Draw memory over time."""
    times, sizes = zip(*tally.rss_mb, strict=True)
    figure = new_figure(8, 3.5)
    axes = figure.add_subplot()
    axes.plot([seconds / 60 for seconds in times], sizes)
    axes.set(xlabel="minutes", ylabel="resident MB", ylim=(0, None), title="The proxy's memory")
    save_figure(figure, path)


async def soak(proxy: System, seconds: float, sessions: int, seed: int) -> Tally:
    """Run the sessions and the watch."""
    tally = Tally()
    limits = httpx.Limits(max_connections=4 * sessions)
    async with httpx.AsyncClient(base_url=proxy.origin, timeout=120, limits=limits) as http:
        model = (await http.get("/v1/models")).json()["data"][0]["id"]
        until = time.monotonic() + seconds
        with progress("seconds", seconds) as step:
            async with asyncio.TaskGroup() as group:
                group.create_task(watch(proxy.pid, tally, seconds, step))
                for number in range(sessions):
                    agent = Agent(http, model, tally, seed + number)
                    group.create_task(agent.run(until))
    return tally


def main() -> int:
    """Run, print, write; returns 1 if memory grew or an answer was wrong."""
    parser = Arguments(__doc__, plot=True)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--sessions", type=int, default=20, help="side by side")
    parser.add_argument("--tolerance", type=float, default=0.03, help="share of the memory")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    with stack() as proxy:
        tally = asyncio.run(soak(proxy, given.minutes * 60, given.sessions, given.seed))
    rise, mean = growth(tally.rss_mb)
    wrong = {status: n for status, n in tally.statuses.items() if status not in ("200", "left")}
    result = {
        "minutes": given.minutes,
        "requests": dict(tally.statuses),
        "outcomes": dict(tally.outcomes),
        "rss_mb": {"mean": round(mean, 1), "rise_in_second_half": round(rise, 2)},
        "flat": rise <= given.tolerance * mean,
        "wrong": wrong,
    }
    if given.plot is not None:
        draw(given.plot, tally)
    return report(given.json, result, passed=bool(result["flat"]) and not wrong)
