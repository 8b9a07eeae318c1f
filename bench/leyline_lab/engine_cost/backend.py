"""The cost of Leyline's back end to a server that nobody sends edits.

Two SGLang servers run side by side on this machine's CPU: one without Leyline's plugin and back end
(``stock``), one with them. Both are sent the same conversations, in turns, with a third way between
them: the same server again, each request with an envelope that only registers its turn. The CPU
time of the scheduler process, per conversation, is compared.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from statistics import median

from leyline_engine.contract import EditPayload

from ..console import write_json
from ..engines.process import EngineProcess
from ..engines.sglang import sglang_server
from ..harness.arguments import Arguments
from ..harness.machine import family
from ..harness.report import Step, progress, show
from ..harness.statistics import median_interval
from ..three_arm.clients import GenerateClient

GOAL = 1.03
WAYS = ("stock", "leyline", "registering")
WARM_UP = 3
_SCHEDULER = "sglang::schedul"
"""The part of the process's name that the kernel keeps."""
_VOCABULARY = range(10, 400)
_SETTLE_S = 0.05
"""Seconds for a scheduler's work after a last answer."""
# Idle schedulers poll otherwise, and that counts as CPU time.
_FLAGS = ("--sleep-on-idle",)
_STOCK_FLAGS = (*_FLAGS, "--radix-cache-backend=")
_STOCK = {"SGLANG_PLUGINS": "leyline_cpu"}


@dataclass(frozen=True, slots=True)
class Ratio:
    """CPU time of one way over stock's, by conversation."""

    median: float
    low: float
    high: float
    """Upper end of the median's 95 % interval; ``low`` is its lower end."""
    n: int
    cpu_ms: float
    """Median CPU time per request."""


class Scheduler:
    """The scheduler process of a server, and the CPU time that it has used."""

    def __init__(self, server: EngineProcess) -> None:
        self._pid = next(pid for pid in family(server.pid) if _comm(pid).startswith(_SCHEDULER))

    def cpu_ms(self) -> float:
        """Return the CPU ms of all its threads, from the kernel's own account in nanoseconds."""
        tasks = Path(f"/proc/{self._pid}/task").iterdir()
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e6


def _comm(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Shape:
    """One conversation: requests, each with the one before as a prefix."""

    turns: int
    tokens: int
    new_tokens: int

    def prompts(self, seed: int) -> list[list[int]]:
        """Return the token ids of its requests."""
        chance = Random(seed)
        drawn = [chance.choice(_VOCABULARY) for _ in range(self.turns * self.tokens)]
        return [drawn[: self.tokens * (turn + 1)] for turn in range(self.turns)]


async def converse(client: GenerateClient, shape: Shape, seed: int, *, register: bool) -> None:
    """Send one conversation, request by request."""
    for turn, prompt in enumerate(shape.prompts(seed)):
        name = f"{seed}.{turn}"
        payload = EditPayload(session=str(seed), scope="bench", turn=name) if register else None
        salt = f"{seed}.{register}"
        await client.generate(
            prompt, shape.new_tokens, salt=salt, message_id=name, payload=payload, logprobs=False
        )
    await asyncio.sleep(_SETTLE_S)


async def measure(
    servers: Mapping[str, EngineProcess], shape: Shape, count: int, step: Step
) -> dict[str, list[float]]:
    """Return CPU ms per request by way, one entry per conversation; the order rotates.

    ``WARM_UP`` conversations at the start don't count.
    """
    clients = {way: GenerateClient(server.url) for way, server in servers.items()}
    schedulers = {way: Scheduler(server) for way, server in servers.items()}
    seen: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(count + WARM_UP):
        shift = number % len(WAYS)
        for way in WAYS[shift:] + WAYS[:shift]:
            before = schedulers[way].cpu_ms()
            await converse(clients[way], shape, number, register=way == "registering")
            spent = schedulers[way].cpu_ms() - before
            if number >= WARM_UP:
                seen[way].append(spent / shape.turns)
            step()
    for client in clients.values():
        await client.close()
    return seen


def compare(stock: Sequence[float], way: Sequence[float]) -> Ratio:
    """Return the ratio of conversations, pair by pair."""
    ratios = [mine / theirs for mine, theirs in zip(way, stock, strict=True)]
    return Ratio(*median_interval(ratios), len(ratios), median(way))


def verdict(ratio: Ratio) -> str:
    """Return a word on the goal."""
    return "met" if ratio.high <= GOAL else "not shown" if ratio.low <= GOAL else "NOT MET"


def main() -> None:
    """Measure, print, write."""
    parser = Arguments(__doc__)
    parser.add_argument("--count", type=int, default=40, help="conversations of each way")
    parser.add_argument("--turns", type=int, default=4, help="requests of a conversation")
    parser.add_argument("--tokens", type=int, default=100, help="new tokens of each request")
    parser.add_argument("--new-tokens", type=int, default=8, help="generated by each request")
    parser.add_argument("--logs", type=Path, default=Path("out"), help="folder for servers' logs")
    given = parser.parse_args()
    shape = Shape(given.turns, given.tokens, given.new_tokens)
    with (
        sglang_server(None, given.logs / "stock.log", _STOCK_FLAGS, _STOCK) as stock,
        sglang_server(None, given.logs / "leyline.log", _FLAGS) as leyline,
        progress("conversations", (given.count + WARM_UP) * len(WAYS)) as step,
    ):
        servers = dict(zip(WAYS, (stock, leyline, leyline), strict=True))
        seen = asyncio.run(measure(servers, shape, given.count, step))
    results = {way: compare(seen["stock"], seen[way]) for way in WAYS[1:]}
    floor = median(seen["stock"])
    rows = [
        (
            way,
            f"{ratio.cpu_ms:.2f}",
            f"{ratio.median:.3f}",
            f"{ratio.low:.3f} to {ratio.high:.3f}",
            verdict(ratio),
        )
        for way, ratio in results.items()
    ]
    columns = ("way", "ms", "ratio to stock", "95 %", f"at most {GOAL}")
    title = "CPU time of the scheduler per request"
    show(columns, [("stock", f"{floor:.2f}", "", "", ""), *rows], title=title)
    figures = {way: asdict(ratio) for way, ratio in results.items()}
    write_json(given.json, figures | {"stock": {"cpu_ms": floor}})
