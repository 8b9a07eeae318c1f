"""Proxies and engines replaced one by one under load, sessions in Redis: no client notices.

Proxies are processes of their own: one is asked to stop while streams run, the other is killed.
Clients do what any client of a load balancer does: they try another proxy when a connection breaks
before an answer began.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.redis_server import RedisServer, free_port

from leyline_lab.stand_ins.serving import check_clean, serving
from leyline_proxy.upstream.embedded import create_embedded_engine

CHAT = "/v1/chat/completions"
LEYLINE = str(Path(sys.executable).with_name("leyline"))
AGENTS, TURNS = 3, 10
LONGEST_S = 30.0
"""For one request; more is hanging."""


class Proxy:
    """``leyline serve`` on a port that it keeps over restarts."""

    def __init__(self, engines: dict[str, str], redis: str) -> None:
        self.port = free_port()
        self.origin = f"http://127.0.0.1:{self.port}"
        self._command = [LEYLINE, "serve", "--port", str(self.port), "--log-level", "error"]
        for name, origin in engines.items():
            self._command += ["--upstream", f"{name}={origin}"]
        self._environment = {
            **os.environ,
            "LEYLINE_SESSION_STORE": redis,
            "LEYLINE_SESSION_SECRET": "a secret of the tests",
            "LEYLINE_HANDSHAKE_INTERVAL_S": "0.5",
        }
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Begin to start it."""
        self._process = subprocess.Popen(
            self._command, env=self._environment, stdout=subprocess.DEVNULL
        )

    def wait_ready(self) -> None:
        """Wait until it serves."""
        deadline = time.monotonic() + 60
        while True:
            assert time.monotonic() < deadline and self._process and self._process.poll() is None
            try:
                if httpx.get(f"{self.origin}/readyz", timeout=5).status_code == httpx.codes.OK:
                    return
            except httpx.HTTPError:
                time.sleep(0.1)

    def end(self, how: signal.Signals) -> int:
        """End it; the exit status."""
        assert self._process is not None
        self._process.send_signal(how)
        status = self._process.wait(60)
        self._process = None
        return status

    def close(self) -> None:
        """End it if it runs."""
        if self._process is not None:
            self.end(signal.SIGKILL)


def history(agent: int, turn: int) -> list[dict[str, Any]]:
    """An agent's messages on its turn: the answers in it are its own."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You are an agent that looks into folders. " * 3},
        {"role": "user", "content": f"Agent {agent}, begin."},
    ]
    for number in range(turn):
        messages += [
            {"role": "assistant", "content": f"Looking at {number}."},
            {"role": "user", "content": f"There is {agent}-{number}. Go on."},
        ]
    return messages


class Agent(threading.Thread):
    """Talks through whichever proxy answers."""

    def __init__(self, number: int, model: str, origins: list[str]) -> None:
        super().__init__()
        self.number = number
        self.answers: list[str] = []
        self.torn = 0
        self.slowest_s = 0.0
        self.may_go_to = 0
        """Turns before this one may be made."""
        self._model = model
        self._origins = origins

    def run(self) -> None:
        """All turns."""
        for turn in range(TURNS):
            while turn >= self.may_go_to:
                time.sleep(0.01)
            started = time.monotonic()
            self.answers.append(self._turn(turn))
            self.slowest_s = max(self.slowest_s, time.monotonic() - started)

    def _turn(self, turn: int) -> str:
        body = request(self._model, history(self.number, turn)) | {"stream": True}
        deadline = time.monotonic() + LONGEST_S
        attempt = self.number + turn
        while time.monotonic() < deadline:
            origin = self._origins[attempt % len(self._origins)]
            attempt += 1
            try:
                answer = httpx.post(f"{origin}{CHAT}", json=body, timeout=LONGEST_S)
            except httpx.TransportError as error:
                self.torn += isinstance(error, httpx.RemoteProtocolError)
                time.sleep(0.05)
                continue
            if answer.status_code == httpx.codes.OK and answer.text.endswith("[DONE]\n\n"):
                return text_of(answer.text)
            return f"{answer.status_code}: {answer.text[-300:]}"
        return "hung"


def talk(agents: list[Agent], turns: int) -> None:
    """Wait until every agent has made so many turns."""
    for agent in agents:
        agent.may_go_to = turns
    deadline = time.monotonic() + 4 * LONGEST_S
    while any(len(agent.answers) < turns for agent in agents):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def request(model: str, messages: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "model": model,
        "messages": messages,
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
    }


def text_of(stream: str) -> str:
    """The text that a stream's deltas make."""
    events = [line.removeprefix("data: ") for line in stream.splitlines() if line[:6] == "data: "]
    chunks = [json.loads(event) for event in events if event != "[DONE]"]
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    return "".join(delta.get("content") or "" for delta in deltas)


@contextmanager
def engines(*names: str) -> Iterator[dict[str, str]]:
    """Replay engines of this process, by name."""
    with ExitStack() as stack:
        apps = {
            name: create_embedded_engine("replay", {"device": "cpu", "pool_tokens": 32_768})
            for name in names
        }
        yield {name: stack.enter_context(serving(app)) for name, app in apps.items()}
    for app in apps.values():
        check_clean(app)


@pytest.mark.nightly
def test_proxies_that_are_stopped_and_killed_lose_no_session_and_change_no_answer(
    tmp_path: Path,
) -> None:
    """Every turn of every agent is answered as an engine alone answers it, in time; each agent has
    one session, which knows all its turns; a proxy that is asked to stop ends its streams first."""
    redis = RedisServer(tmp_path)
    redis.start()
    with ExitStack() as stack:
        stack.callback(redis.kill)
        (alone,) = stack.enter_context(engines("alone")).values()
        model = httpx.get(f"{alone}/v1/models").json()["data"][0]["id"]
        wanted = [
            [
                httpx.post(
                    f"{alone}{CHAT}", json=request(model, history(agent, turn)), timeout=60
                ).json()["choices"][0]["message"]["content"]
                for turn in range(TURNS)
            ]
            for agent in range(AGENTS)
        ]
        behind = stack.enter_context(engines("a", "b"))
        proxies = [Proxy(behind, redis.url) for _ in range(2)]
        for proxy in proxies:
            stack.callback(proxy.close)
            proxy.start()
        for proxy in proxies:
            proxy.wait_ready()
        agents = [Agent(n, model, [proxy.origin for proxy in proxies]) for n in range(AGENTS)]
        for agent in agents:
            agent.start()
        talk(agents, 2)
        for agent in agents:
            agent.may_go_to = 6
        time.sleep(0.2)
        assert proxies[0].end(signal.SIGTERM) == 0
        torn_by_stopping = sum(agent.torn for agent in agents)
        proxies[0].start()
        proxies[0].wait_ready()
        talk(agents, 7)
        for agent in agents:
            agent.may_go_to = TURNS
        time.sleep(0.2)
        proxies[1].end(signal.SIGKILL)
        proxies[1].start()
        proxies[1].wait_ready()
        for agent in agents:
            agent.join()
        listed = httpx.get(f"{proxies[0].origin}/v1/leyline/sessions", timeout=30).json()
    assert [agent.answers for agent in agents] == wanted
    assert torn_by_stopping == 0
    assert max(agent.slowest_s for agent in agents) < LONGEST_S
    sessions = listed["sessions"]
    assert len(sessions) == AGENTS, sessions
    assert all(session["turns"] >= TURNS for session in sessions)
