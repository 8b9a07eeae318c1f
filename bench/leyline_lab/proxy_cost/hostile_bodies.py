"""The longest stall and the peak memory of a proxy while one client sends it hostile requests.

Each case has a real proxy of its own, with one worker, in front of an upstream that does no work.
Meanwhile another process asks for ``/healthz`` every few milliseconds on a connection of its own.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import httpx
from transformers import AutoTokenizer
from websockets.asyncio.client import ClientConnection, connect

from leyline_replay.models.trained import DEFAULT_MODEL_NAME, trained_model_dir
from leyline_replay.text.chat import PromptEncoder

from ..console import write_json
from ..harness.arguments import Arguments
from ..harness.machine import memory_mib
from ..harness.report import show
from .agent import text_of_size
from .load import canned
from .systems import System, leyline, python
from .upstream import MODEL

GOAL_S = 0.05
LARGE = 31 << 20
CHAT, SOCKET = "/v1/chat/completions", "/v1/responses"
JSON = {"content-type": "application/json"}


@dataclass
class Target:
    """A proxy under attack."""

    origin: str
    statuses: list[str] = field(default_factory=list)
    """The answers to the requests: statuses, or errors."""

    async def post(self, content: bytes, path: str = CHAT) -> None:
        """Send one body."""
        async with httpx.AsyncClient(base_url=self.origin, timeout=300) as client:
            try:
                answer = await client.post(path, content=content, headers=JSON)
                self.statuses.append(str(answer.status_code))
            except httpx.HTTPError as error:
                self.statuses.append(type(error).__name__)

    async def chat(self, content: Any, **members: Any) -> None:
        """Send one chat with a single message."""
        await self.post(body({"messages": [{"role": "user", "content": content}], **members}))

    def socket(self, *, compressed: bool) -> connect:
        """Return a connection to the Responses API."""
        url = self.origin.replace("http", "ws") + SOCKET
        compression = "deflate" if compressed else None
        return connect(url, max_size=None, proxy=None, compression=compression)


@dataclass(frozen=True)
class Case:
    """Requests that a client may send."""

    name: str
    send: Callable[[Target], Awaitable[None]]
    settings: dict[str, str] = field(default_factory=dict)
    """Of the proxy, in its environment."""


@dataclass(frozen=True)
class Seen:
    """The figures of a case."""

    case: str
    stall_ms: float
    """The longest answer to a probe."""
    peak_mib: int
    after_mib: int
    wall_s: float
    statuses: str


def body(members: dict[str, Any]) -> bytes:
    """Return a body for the upstream's model."""
    return json.dumps({"model": MODEL, **members}, separators=(",", ":")).encode()


def filled(unit: bytes, size: int = LARGE) -> bytes:
    """Return a chat whose member ``metadata`` is a list of a unit, as long as ``size``."""
    rest = body({"messages": [{"role": "user", "content": "Hi."}]})
    count = (size - len(rest)) // (len(unit) + 1)
    return b'{"metadata":[%b],%b' % (b",".join([unit] * count), rest[1:])


def nested(depth: int) -> bytes:
    """Return a chat whose member ``metadata`` is as deep."""
    return body({"messages": [{"role": "user", "content": "Hi."}], "metadata": "@"}).replace(
        b'"@"', b"[" * depth + b"]" * depth
    )


def names(size: int = LARGE) -> bytes:
    """Return a chat whose member ``metadata`` is one object with as many names as fit."""
    rest = body({"messages": [{"role": "user", "content": "Hi."}]})
    members = b",".join(b'"k%07d":0' % number for number in range(size // 13))
    return b'{"metadata":{%b},%b' % (members, rest[1:])


def declared(size: int) -> bytes:
    """Return a chat that edits each of many parts of a message, of ``size`` bytes."""
    count = size // 90
    parts = [{"type": "text", "text": "ab"}] * count
    edits = [
        {"message": 0, "chars": [2 * at, 2 * at + 1], "replacement": ""} for at in range(count)
    ]
    message = {"role": "user", "content": parts}
    return body({"messages": [message], "leyline": {"edits": edits}})


async def nothing(target: Target) -> None:
    """Wait: what the machine itself does to the probe."""
    await asyncio.sleep(2)


async def asked_with(target: Target, policy: str) -> None:
    """Send forty messages to a policy of the caller's own."""
    messages = [
        {"role": "user", "content": f"{number} " + "a" * 4000 + "!"} for number in range(40)
    ]
    await target.post(body({"messages": messages, "leyline": {"policy": policy}}))


async def compressed_frames(target: Target) -> None:
    """Send frames that become a thousand times larger."""
    frame = b'{"type":"response.create","model":"%b","input":[%b]}' % (
        MODEL.encode(),
        b",".join([b"[]"] * (LARGE // 3)),
    )
    with suppress(Exception):
        async with target.socket(compressed=True) as connection:
            for _ in range(4):
                await connection.send(frame.decode())
            for _ in range(4):
                answer = json.loads(await asyncio.wait_for(connection.recv(), 120))
                target.statuses.append(str(answer.get("status", answer.get("type"))))
            return
    target.statuses.append("closed")


async def unfinished_frames(target: Target) -> None:
    """Begin frames on twelve connections, and never end them."""

    async def parts() -> AsyncIterator[str]:
        yield '{"input":"' + "a" * LARGE
        await asyncio.Event().wait()

    async def begin(connection: ClientConnection) -> None:
        with suppress(Exception):
            await connection.send(parts())
        target.statuses.append("closed")

    async with asyncio.TaskGroup() as group, asyncio.timeout(20):
        connections: list[ClientConnection] = []
        for _ in range(12):
            with suppress(Exception):
                connections.append(await target.socket(compressed=True))
        tasks = [group.create_task(begin(each)) for each in connections]
        await asyncio.wait(tasks, timeout=8)
        for task in tasks:
            task.cancel()
        for connection in connections:
            connection.transport.abort()
    if not target.statuses:
        target.statuses.append("open")


async def proofs(target: Target) -> None:
    """Demand many proofs of one session at once."""
    headers = {**JSON, "x-leyline-session": "s"}
    messages = [{"role": "user", "content": "Hi."}]
    async with httpx.AsyncClient(base_url=target.origin, timeout=120) as client:
        await client.post(CHAT, content=body({"messages": messages}), headers=headers)
        path = "/v1/leyline/sessions/s/proof"
        asked = [client.post(path, content=b"{}", headers=JSON) for _ in range(200)]
        for answer in await asyncio.gather(*asked, return_exceptions=True):
            code = answer.status_code if isinstance(answer, httpx.Response) else answer
            target.statuses.append(str(code))


PATTERNS = {"LEYLINE_ALLOW_REQUEST_POLICY": "true"}
COSTLY = ";".join(
    f"redact:pattern=(?:{a}{{1,140}}){{1,140}}" for a in "abcdefghijklmnopqrstuvwxyz" * 3
)
CASES = (
    Case("nothing", nothing),
    Case("text, 31 MiB", lambda to: to.chat("a" * LARGE)),
    Case("text of escapes, 31 MiB", lambda to: to.chat("\n" * (LARGE // 2))),
    Case("one message of 400 KB", lambda to: to.chat(text_of_size(random.Random(5), 400_000))),
    Case("[],[],… 31 MiB", lambda to: to.post(filled(b"[]"))),
    Case("[],[],… as many as pass", lambda to: to.post(filled(b"[]", 298_000))),
    Case("1e300,… 31 MiB", lambda to: to.post(filled(b"1e300"))),
    Case("1e300,… as many as pass", lambda to: to.post(filled(b"1e300", 398_000))),
    Case("one object, 31 MiB", lambda to: to.post(names())),
    Case("one object, as much as passes", lambda to: to.post(names(460_000))),
    Case("depth 900", lambda to: to.post(nested(900))),
    Case("depth 16 million", lambda to: to.post(nested(LARGE // 2))),
    Case("token ids, 1 million", lambda to: to.post(ids(1_000_000), "/v1/completions")),
    Case("declared edits, 420 KiB", lambda to: to.post(declared(420 << 10))),
    Case("declared edits, 848 KiB", lambda to: to.post(declared(848 << 10))),
    Case("4 compressed frames of 30 MiB", compressed_frames),
    Case("12 unfinished frames of 31 MiB", unfinished_frames),
    Case("pattern (?:a|aa)+$", lambda to: asked_with(to, "redact:pattern=(?:a|aa)+$"), PATTERNS),
    Case("78 costly patterns", lambda to: asked_with(to, COSTLY), PATTERNS),
    Case("200 proofs", proofs),
)


def ids(count: int) -> bytes:
    """Return a completion of token ids."""
    return body({"prompt": [12_345] * count, "max_tokens": 1})


@contextmanager
def probed(origin: str) -> Iterator[list[float]]:
    """Probe a proxy meanwhile; afterwards the list has the longest wait in seconds."""
    found: list[float] = []
    command, pipe = python("leyline_lab.proxy_cost.probe", origin), subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as prober:
        assert prober.stdin is not None and prober.stdout is not None
        if prober.stdout.readline().strip() != "ready":
            raise RuntimeError("the proxy isn't healthy")
        try:
            yield found
        finally:
            prober.stdin.close()
            found.append(float(prober.stdout.readline()))


def measure(case: Case, system: System) -> Seen:
    """Play one case."""
    target, begun = Target(system.origin), time.perf_counter()
    with probed(system.origin) as stalls:
        asyncio.run(_sent(case, target))
        wall_s = time.perf_counter() - begun
        time.sleep(0.5)
    counted = sorted(Counter(target.statuses).items())
    statuses = (f"{count} × {status}" if count > 1 else status for status, count in counted)
    return Seen(
        case.name,
        round(1e3 * stalls[0], 1),
        int(memory_mib(system.pid, "VmHWM")),
        int(memory_mib(system.pid)),
        round(wall_s, 1),
        ", ".join(statuses),
    )


async def _sent(case: Case, target: Target) -> None:
    await case.send(target)


def renderer_document() -> dict[str, Any]:
    """Return the template and tokenizer of the shipped model, as an engine does."""
    folder = trained_model_dir(DEFAULT_MODEL_NAME)
    if folder is None:
        raise RuntimeError("the shipped model is missing")
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    return PromptEncoder(tokenizer).renderer_document()


def rows(found: list[Seen]) -> Iterator[list[str]]:
    """Yield the results, and the goal beside them."""
    for each in found:
        over = each.stall_ms > 1e3 * GOAL_S
        stall = f"[bold]{each.stall_ms:.0f}[/]" if over else f"{each.stall_ms:.0f}"
        figures = (str(each.peak_mib), str(each.after_mib), f"{each.wall_s:.1f}")
        yield [each.case, each.statuses, stall, f"{1e3 * GOAL_S:.0f}", *figures]


COLUMNS = ("case", "answers", "stall, ms", "goal, ms", "peak, MiB", "after, MiB", "wall, s")


def main() -> None:
    """Play all cases, print, write."""
    parser = Arguments(__doc__)
    parser.add_argument("--only", metavar="TEXT", help="play the cases whose name contains TEXT")
    parser.add_argument("--list", action="store_true", help="list the cases")
    given = parser.parse_args()
    chosen = [case for case in CASES if given.only is None or given.only in case.name]
    if given.list:
        print("\n".join(case.name for case in chosen))
        return
    found = []
    with canned(renderer_document()) as made, made.upstream() as upstream:
        for case in chosen:
            room = {"LEYLINE_LOG_LEVEL": "error", **case.settings}
            with leyline("proxy", upstream.origin, made.logs, **room) as system:
                found.append(measure(case, system))
            last = found[-1]
            print(f"{last.case}: {last.stall_ms:.0f} ms, {last.peak_mib} MiB", flush=True)
    write_json(given.json, [asdict(each) for each in found])
    title = "One client's hostile requests against one worker"
    show(COLUMNS, rows(found), title=title, words=2)
