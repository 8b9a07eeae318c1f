"""SGLang's real router between a proxy and embedded engines, and sessions that edit through it."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
from starlette.applications import Starlette

from leyline_proxy.http.app import create_app
from leyline_proxy.settings import Settings
from leyline_proxy.upstream.embedded import create_embedded_engine

from ..harness.machine import free_port
from .serving import check_clean, serving

POLICIES = ("manual", "consistent_hashing", "cache_aware", "round_robin")

_LAUNCH = """
import sys
from sglang_router.launch_router import launch_router
from sglang_router.router_args import RouterArgs
port, policy, threshold, *workers = sys.argv[1:]
launch_router(RouterArgs(host="127.0.0.1", port=int(port), policy=policy, worker_urls=workers,
    log_level="error", worker_startup_check_interval=1, cache_threshold=float(threshold)))
"""
"""The command line offers only some of the policies that the router has."""

_START_S = 60.0
_WORDS = ("tide", "harbour", "lantern", "meadow", "granite", "willow", "copper", "saddle", "amber")


@contextmanager
def router(policy: str, workers: Sequence[str], *, cache_threshold: float = 0.3) -> Iterator[str]:
    """Run a router with a policy, and yield its origin once it knows all workers.

    Args:
        cache_threshold: share of a request's text that ``cache_aware`` must have seen at a worker;
            0.3 is the router's default.
    """
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", _LAUNCH, str(port), policy, str(cache_threshold), *workers],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    origin = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + _START_S
        while _healthy(origin) < len(workers):
            assert process.poll() is None and time.monotonic() < deadline, "it did not start"
            time.sleep(0.1)
        yield origin
    finally:
        process.terminate()
        process.wait(30)


def _healthy(origin: str) -> int:
    try:
        found = httpx.get(f"{origin}/workers", timeout=5).json()["workers"]
    except (httpx.HTTPError, ValueError, KeyError):
        return 0
    return sum(bool(worker["is_healthy"]) for worker in found)


@dataclass
class Fleet:
    """Embedded engines by name, which proxies and routers share."""

    stack: ExitStack
    apps: dict[str, Starlette]
    origins: dict[str, str]
    settings: dict[str, Any] = field(default_factory=dict)

    def proxy(self, between: str | None = None, **settings: Any) -> Proxy:
        """Return a proxy in front of the engines, through a router if there is one."""
        app = create_app(
            Settings(
                upstreams=self.origins,
                router=between,
                log_level="error",
                **{**self.settings, **settings},
            )
        )
        origin = self.stack.enter_context(serving(app))
        client = self.stack.enter_context(httpx.Client(base_url=origin, timeout=120))
        return Proxy(app, client, client.get("/v1/models").json()["data"][0]["id"])


@contextmanager
def fleet(count: int, *, pool_tokens: int = 65_536, **settings: Any) -> Iterator[Fleet]:
    """Run several embedded engines, checked for leaks at the end."""
    options = {"device": "cpu", "pool_tokens": pool_tokens}
    with ExitStack() as stack:
        names = [f"e{number}" for number in range(count)]
        apps: dict[str, Starlette] = {
            name: create_embedded_engine("replay", options) for name in names
        }
        origins = {name: stack.enter_context(serving(app)) for name, app in apps.items()}
        yield Fleet(stack, apps, origins, settings)
    for app in apps.values():
        check_clean(app)


@dataclass
class Proxy:
    """A proxy that serves, and its only model."""

    app: Any
    client: httpx.Client
    model: str

    def ask(self, session: str, messages: list[dict[str, Any]], **members: Any) -> dict[str, Any]:
        """Return the answer to a turn."""
        body = {"model": self.model, "messages": messages, "max_tokens": 2, "temperature": 0}
        answer = self.client.post(
            "/v1/chat/completions",
            json={**body, "ignore_eos": True, **members},
            headers={"x-leyline-session": session},
        )
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def account(
        self, session: str, messages: list[dict[str, Any]], **members: Any
    ) -> dict[str, Any]:
        """Return the account of a turn."""
        found: dict[str, Any] = self.ask(session, messages, **members)["leyline"]
        return found

    def answers(self) -> dict[tuple[str, str], int]:
        """Return ``leyline_router_answers_total`` by engine and kind of answer."""
        found = {}
        for line in self.client.get("/metrics").text.splitlines():
            if line.startswith("leyline_router_answers_total{"):
                labels, value = line.removeprefix("leyline_router_answers_total").rsplit(" ", 1)
                pairs = dict(pair.split("=") for pair in labels.strip("{}").split(","))
                key = (pairs["upstream"].strip('"'), pairs["answered"].strip('"'))
                found[key] = int(float(value))
        return found

    def kinds(self) -> Counter[str]:
        """Return the number of turns by kind of answer."""
        found = Counter[str]()
        for (_, kind), count in self.answers().items():
            found[kind] += count
        return +found  # a series may be there before its first turn


@dataclass
class Reuse:
    """The origin of the prompt tokens of many turns."""

    prompt: int = 0
    served: int = 0
    spliced: int = 0
    later: int = 0
    """Prompt tokens of all turns but a session's first."""

    @property
    def ratio(self) -> float:
        """Return the share of the prompt tokens that no engine prefilled."""
        return self.served / self.prompt

    def add(self, tokens: dict[str, int], *, first: bool) -> None:
        """Count one turn."""
        self.prompt += tokens["prompt"]
        self.served += tokens["prefix"] + tokens["spliced"] + tokens["reused"]
        self.spliced += tokens["spliced"]
        self.later += 0 if first else tokens["prompt"]


def conversation(number: int, turns: int, tag: str = "") -> list[dict[str, Any]]:
    """Return an agent's conversation with long results, no two of which begin alike."""
    chosen = random.Random(f"{tag}{number}")
    text = " ".join(chosen.choices(_WORDS, k=12))
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": f"Task {number}: {text}. Look into the folders."}
    ]
    for turn in range(turns):
        result = " ".join(chosen.choices(_WORDS, k=100))
        call = {"name": "shell", "arguments": f'{{"command": "ls {turn}"}}'}
        messages += [
            {
                "role": "assistant",
                "content": f"Look {turn}.",
                "tool_calls": [{"id": f"c{turn}", "type": "function", "function": call}],
            },
            {"role": "tool", "tool_call_id": f"c{turn}", "content": f"{number}: {result}"},
        ]
    return messages


TRUNCATE = "truncate_older_than:n=2,max_chars=80"


def measure(proxy: Proxy, sessions: int, turns: int, *, tag: str, at_once: int = 4) -> Reuse:
    """Play sessions whose policy shortens an old result on nearly every turn, interleaved."""
    found = Reuse()
    with ThreadPoolExecutor(at_once) as pool:
        for turn in range(turns):

            def one(number: int, turn: int = turn) -> dict[str, int]:
                messages = conversation(number, turns, tag)[: 2 * turn + 1]
                account = proxy.account(f"{tag}-{number}", messages)
                tokens: dict[str, int] = account["tokens"]
                return tokens

            # In one order on every turn, round robin would be an affinity.
            order = random.Random(turn).sample(range(sessions), sessions)
            for tokens in pool.map(one, order):
                found.add(tokens, first=turn == 0)
    return found
