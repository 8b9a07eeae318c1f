"""The example of one big machine runs: green takes over from blue, as its page describes."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from support.agent_history import agent_history
from support.redis_server import RedisServer, free_port
from support.waiting import wait

from leyline_lab.stand_ins.serving import serving
from leyline_proxy.audit.chain import AuditKey
from leyline_proxy.audit.reading import find_logs, verify
from leyline_proxy.upstream.embedded import create_embedded_engine

EXAMPLE = Path(__file__).parents[2] / "deploy" / "systemd"
SECRET = "a long secret of the tests"
KEY = "key-of-the-red-tenant"
CHAT = "/v1/chat/completions"


def variables(path: Path) -> dict[str, str]:
    """The variables of a file, as systemd reads them; those that are empty get a value."""
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return {name: given or SECRET for name, _, given in (line.partition("=") for line in lines)}


def directive(name: str) -> str:
    """The value of a key of the unit."""
    (value,) = (
        line.partition("=")[2]
        for line in (EXAMPLE / "leyline@.service").read_text().splitlines()
        if line.startswith(f"{name}=")
    )
    return value


def history(turns: int) -> list[dict[str, Any]]:
    """An agent's history."""
    return agent_history(turns, "Begin.", secret="the long middle", lines=40)


class Colour:
    """One of the two proxies, started by the unit's command line; its places are the test's.

    Args:
        config: the example's settings with the test's places.
        workers: in place of eight; this machine has two cores.
    """

    def __init__(self, name: str, config: Path, workers: int = 2) -> None:
        own = variables(EXAMPLE / f"{name}.env")
        self.port, self.admin_port = free_port(), free_port()
        places = {"LEYLINE_PORT": self.port, "LEYLINE_ADMIN_PORT": self.admin_port}
        assert places.keys() <= own.keys()
        self._environment = {
            **os.environ,
            **variables(EXAMPLE / "secrets.env.example"),
            **own,
            **{key: str(value) for key, value in places.items()},
            "LEYLINE_WORKERS": str(workers),
            "LEYLINE_LOG_LEVEL": "error",
        }
        program, *words = shlex.split(directive("ExecStart").replace("%i", name))
        assert program == f"/opt/leyline/{name}/bin/leyline"
        leyline = str(Path(sys.executable).with_name("leyline"))
        self._command = [leyline, *(str(config) if ".yaml" in word else word for word in words)]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it is ready."""
        self._process = subprocess.Popen(
            self._command, env=self._environment, stdout=subprocess.DEVNULL
        )
        wait(self.ready, seconds=90)

    def ready(self) -> bool:
        """True if it serves."""
        assert self._process is not None and self._process.poll() is None
        try:
            return httpx.get(f"http://127.0.0.1:{self.port}/readyz", timeout=5).is_success
        except httpx.HTTPError:
            return False

    def turn(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """The account of a turn of the one session."""
        body = {"model": "leyline-recall", "messages": messages, "max_tokens": 2}
        body["leyline"] = {"undeclared": {"tool": "amortize"}}
        headers = {"x-leyline-session": "one", "authorization": f"Bearer {KEY}"}
        url = f"http://127.0.0.1:{self.port}{CHAT}"
        answer = httpx.post(url, json=body, headers=headers, timeout=60)
        assert answer.status_code == httpx.codes.OK, answer.text
        account: dict[str, Any] = answer.json()["leyline"]
        return account

    def drain(self, engine: str) -> int:
        """Drain an engine; the status."""
        url = f"http://127.0.0.1:{self.admin_port}/admin/upstreams/{engine}/drain"
        return httpx.post(url, headers={"authorization": f"Bearer {SECRET}"}).status_code

    def stop(self) -> tuple[int, float]:
        """End it as systemd does; the exit status, and the seconds that it took."""
        assert self._process is not None
        begun = time.monotonic()
        self._process.send_signal(signal.SIGTERM)
        status = self._process.wait(int(directive("TimeoutStopSec")))
        self._process = None
        return status, time.monotonic() - begun

    def close(self) -> None:
        """End it if it runs."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


@contextmanager
def config(folder: Path, redis: str) -> Iterator[Path]:
    """The example's settings with an engine, a Redis and folders of the test."""
    given = yaml.safe_load((EXAMPLE / "leyline.yaml").read_text())
    keys = folder / "api-keys"
    keys.write_text(f"red:{KEY}\n")
    keys.chmod(0o600)
    replay = create_embedded_engine("replay", {"device": "cpu", "hints_secret": SECRET})
    with serving(replay) as engine:
        places = {
            "upstreams": {"gpu0": engine},
            "session_store": redis,
            "api_keys_file": str(keys),
            "audit_file": str(folder / Path(given["audit_file"]).name),
            "shutdown_delay_s": 1,
        }
        assert places.keys() <= given.keys()
        path = folder / "leyline.yaml"
        path.write_text(yaml.safe_dump({**given, **places}))
        yield path
    replay.state.shutdown()


@pytest.mark.nightly
def test_green_takes_over_from_blue(tmp_path: Path) -> None:
    """Green serves before blue stops, continues blue's session with a splice, and both logs are
    good."""
    store = RedisServer(tmp_path)
    with ExitStack() as stack:
        store.start()
        stack.callback(store.kill)
        settings = stack.enter_context(config(tmp_path, store.url))
        blue, green = Colour("blue", settings), Colour("green", settings)
        stack.callback(blue.close)
        stack.callback(green.close)
        blue.start()
        for turns in (1, 2):
            blue.turn(history(turns))
        green.start()
        assert blue.ready()
        status, took_s = blue.stop()
        assert (status, took_s < int(directive("TimeoutStopSec"))) == (0, True)
        edited = history(3)
        edited[3] = {**edited[3], "content": "cut"}
        account = green.turn(edited)
        assert (account["turn_index"], account["outcome"]) == (2, "spliced"), account
        assert green.drain("gpu0") == httpx.codes.OK
        assert green.stop()[0] == 0
    for colour in ("blue", "green"):
        (log,) = find_logs(tmp_path / f"audit-{colour}.jsonl")
        found = verify(log, [AuditKey.derive(SECRET)])
        assert found.good, found.finding
