"""Half an hour of agents, as a test that memory stays flat and every request is answered.

The proxy runs in a process of its own before an engine in another. Sessions talk side by side:
each turn appends a call and a result; the proxy's policies shorten old results and redact keys; now
and then a session changes its own history, goes back a few turns, or hangs up in the middle of a
stream. After some turns a session ends and a new one takes its place, so the store fills up, and
from then on every session that comes pushes one out. The memory of
texts is bounded so that it is full early, too.

Flat means: over the second half of the run, a line through the proxy's resident memory rises by no
more than ``--tolerance`` of it. A request that isn't answered with 200 fails the run, too.

    python bench/proxy_soak.py --minutes 30 --json out/soak.json --plot out/soak.png
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any

import httpx
from rich.console import Console
from rich.progress import Progress, TaskID

CHAT = "/v1/chat/completions"
POLICY = r"truncate_older_than:n=3,max_chars=120 | redact:pattern='key-\d+',replacement='[key]'"
WORDS = ("cache", "span", "claim", "prefix", "slot", "token", "radix", "turn", "edit", "pool")
TURNS = 16
"""Turns of a session, before another takes its place."""

STORED = 64
"""Sessions that the store may hold, so that it is full early in the run."""

TEXT_MEMORY_MB = 48
"""Bound of the proxy's memory of texts; the default would take longer than the run to fill."""

START_S = 120.0
SAMPLE_S = 2.0


@dataclass
class Tally:
    """Counts of a run."""

    statuses: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    rss_mb: list[tuple[float, float]] = field(default_factory=list)
    """Seconds since the start, and the proxy's resident memory then."""


def serve_engine(port: int) -> None:
    """Run the embedded engine alone."""
    import uvicorn

    from leyline_proxy.upstream.embedded import create_embedded_engine

    app = create_embedded_engine("replay", {"device": "cpu", "pool_tokens": 65_536})
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="error")


def free_port() -> int:
    """Return a free port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextmanager
def stack() -> Iterator[tuple[str, int]]:
    """Run an engine and a proxy before it; yields the proxy's address and process id."""
    engine_port, port = free_port(), free_port()
    engine = get_context("spawn").Process(target=serve_engine, args=(engine_port,), daemon=True)
    engine.start()
    command = [str(Path(sys.executable).with_name("leyline")), "serve", "--port", str(port)]
    command += ["--upstream", f"http://127.0.0.1:{engine_port}", "--policy", POLICY]
    command += ["--log-level", "error"]
    environment = {
        **os.environ,
        "LEYLINE_MAX_SESSIONS": str(STORED),
        "LEYLINE_TEXT_MEMORY_BYTES": str(TEXT_MEMORY_MB << 20),
    }
    proxy = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    try:
        yield f"http://127.0.0.1:{port}", proxy.pid
    finally:
        proxy.send_signal(signal.SIGTERM)
        proxy.wait(30)
        engine.terminate()
        engine.join(30)


async def ready(http: httpx.AsyncClient) -> str:
    """Wait for the stack; returns the model that it serves."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        try:
            document = (await http.get("/readyz")).json()
            if document["ready"] and document["upstreams"][0]["splices"]:
                return str((await http.get("/v1/models")).json()["data"][0]["id"])
        except (httpx.HTTPError, ValueError, KeyError):
            pass
        await asyncio.sleep(0.2)
    raise RuntimeError("the stack did not start")


def resident_mb(pid: int) -> float:
    """Return the resident memory of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("the proxy has ended")


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
            {"role": "user", "content": f"{session}: {self._text(30)}"},
        ]
        for turn in range(TURNS):
            if time.monotonic() > until:
                return
            await self._turn(session, messages)
            function = {"name": "shell", "arguments": json.dumps({"command": self._text(3)})}
            call = {"id": f"c{turn}", "type": "function", "function": function}
            result = f"{self._text(self._rng.randint(10, 80))} key-{self._rng.randint(1, 999)}"
            messages += [
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": call["id"], "content": result},
            ]
            self._meddle(messages)

    def _meddle(self, messages: list[dict[str, Any]]) -> None:
        """Change a history as harnesses do now and then."""
        chance, pairs = self._rng.random(), (len(messages) - 2) // 2
        if chance < 0.1 and pairs > 2:
            messages[3] = {**messages[3], "content": self._text(5)}
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

    def _text(self, words: int) -> str:
        return " ".join(self._rng.choices(WORDS, k=words))


async def watch(pid: int, tally: Tally, seconds: float, progress: Progress, task: TaskID) -> None:
    """Note the proxy's memory until the time is over."""
    started = time.monotonic()
    while (passed := time.monotonic() - started) < seconds:
        tally.rss_mb.append((passed, resident_mb(pid)))
        progress.update(task, completed=passed)
        await asyncio.sleep(SAMPLE_S)


def growth(rss_mb: list[tuple[float, float]]) -> tuple[float, float]:
    """Return the rise of a line through the second half, and the half's mean; both in MB."""
    half = rss_mb[len(rss_mb) // 2 :]
    times, sizes = zip(*half, strict=True)
    slope = statistics.linear_regression(times, sizes).slope
    return slope * (times[-1] - times[0]), statistics.fmean(sizes)


def draw(path: Path, tally: Tally) -> None:
    """Draw memory over time."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    times, sizes = zip(*tally.rss_mb, strict=True)
    figure, axes = plt.subplots(figsize=(8, 3.5), layout="constrained")
    axes.plot([seconds / 60 for seconds in times], sizes)
    axes.set(xlabel="minutes", ylabel="resident MB", ylim=(0, None), title="The proxy's memory")
    figure.savefig(path, dpi=120)


async def soak(minutes: float, sessions: int, seed: int) -> Tally:
    """Run the engine, the proxy, the sessions and the watch."""
    tally = Tally()
    with stack() as (origin, pid), Progress() as progress:
        task = progress.add_task("Talking", total=minutes * 60)
        limits = httpx.Limits(max_connections=4 * sessions)
        async with httpx.AsyncClient(base_url=origin, timeout=120, limits=limits) as http:
            model = await ready(http)
            until = time.monotonic() + minutes * 60
            agents = [Agent(http, model, tally, seed + number) for number in range(sessions)]
            async with asyncio.TaskGroup() as group:
                group.create_task(watch(pid, tally, minutes * 60, progress, task))
                for agent in agents:
                    group.create_task(agent.run(until))
    return tally


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--sessions", type=int, default=20, help="side by side")
    parser.add_argument("--tolerance", type=float, default=0.03, help="share of the memory")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    tally = asyncio.run(soak(options.minutes, options.sessions, options.seed))
    rise, mean = growth(tally.rss_mb)
    wrong = {status: n for status, n in tally.statuses.items() if status not in ("200", "left")}
    result = {
        "minutes": options.minutes,
        "requests": dict(tally.statuses),
        "outcomes": dict(tally.outcomes),
        "rss_mb": {"mean": round(mean, 1), "rise_in_second_half": round(rise, 2)},
        "flat": rise <= options.tolerance * mean,
        "wrong": wrong,
    }
    Console().print_json(data=result)
    for path in (options.json, options.plot):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if options.plot is not None:
        draw(options.plot, tally)
    return 0 if result["flat"] and not wrong else 1


if __name__ == "__main__":
    raise SystemExit(main())
