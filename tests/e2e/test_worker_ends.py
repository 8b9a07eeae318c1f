"""Limits over several workers, and workers that end: asked to, killed, or with their supervisor."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from support.fake_engine import DONE, MODEL, FakeEngine, chat_stream
from support.waiting import wait
from support.worker_fleet import LEYLINE, Fleet, alive, fleet

from leyline_lab.stand_ins.serving import serving

CHAT = "/v1/chat/completions"
REQUEST = {"model": MODEL, "stream": True, "messages": [{"role": "user", "content": "Hi."}]}
STREAM_S = 2.0


@contextmanager
def slow(folder: Path, **environment: str) -> Iterator[tuple[Fleet, FakeEngine]]:
    """Two workers in front of an engine whose streams take a while."""
    engine = FakeEngine()
    with serving(engine) as origin, fleet(folder, "--upstream", origin, **environment) as running:
        yield running, engine


def stream(client: httpx.Client, begun: threading.Event | None = None) -> tuple[float, bytes]:
    """A turn's time to the first byte, and its whole stream; it may break off."""
    asked, received, first = time.monotonic(), bytearray(), 0.0
    with client.stream("POST", CHAT, json=REQUEST) as answer:
        try:
            for part in answer.iter_raw():
                first = first or time.monotonic() - asked
                received += part
                if begun is not None:
                    begun.set()
        except httpx.TransportError:
            received += b"torn"
    return first, bytes(received)


def test_limits_are_shared(tmp_path: Path) -> None:
    """A request waits for one at the other worker, and both count into the same minute."""
    limits = json.dumps({"default": {"requests_per_minute": 4}})
    limited = {"LEYLINE_MAX_CONCURRENT": "1", "LEYLINE_TENANTS": limits}
    with slow(tmp_path, **limited) as (running, engine), running.clients() as clients:
        engine.answers = [chat_stream(*["x"] * 20, pause_s=STREAM_S / 20) for _ in range(2)]
        with ThreadPoolExecutor() as pool:
            took = sorted(first for first, _ in pool.map(stream, clients))
        assert took[0] < STREAM_S / 2 < STREAM_S * 0.9 < took[1], took
        codes = [client.post(CHAT, json=REQUEST).status_code for client in clients * 2]
        assert codes == [200, 200, 429, 429]


def test_a_worker_killed_in_a_stream_costs_that_stream(tmp_path: Path) -> None:
    """The other's stream ends well, its place is free again, the port never closes, and the audit
    log names the turn that broke off."""
    audit = {"LEYLINE_AUDIT_FILE": str(tmp_path / "audit"), "LEYLINE_AUDIT_TURNS": "all"}
    with slow(tmp_path, LEYLINE_MAX_CONCURRENT="2", **audit) as (running, engine):
        engine.answers = [chat_stream(*["x"] * 20, pause_s=STREAM_S / 20) for _ in range(2)]
        with running.clients() as clients, ThreadPoolExecutor() as pool:
            begun = [threading.Event(), threading.Event()]
            under_way = [*map(pool.submit, [stream] * 2, clients, begun)]
            assert all(each.wait(30) for each in begun)
            os.kill(running.pids()[0], signal.SIGKILL)
            torn, whole = (each.result()[1] for each in under_way)
            assert DONE not in torn and whole.endswith(DONE)
        # As many as there are places: the dead worker's is one of them.
        engine.answers = [chat_stream(*["x"] * 10, pause_s=0.05) for _ in range(2)]
        with httpx.Client(base_url=running.origin, timeout=60) as client:
            with ThreadPoolExecutor() as pool:
                answers = [*pool.map(stream, [client, client])]
            assert all(first < STREAM_S and body.endswith(DONE) for first, body in answers)
            wait(lambda: len(running.pids()) == 2 and alive(running.pids()[0]), seconds=60)
    records = [json.loads(line) for line in (tmp_path / "audit").read_text().splitlines()]
    (gap,) = [each for each in records if each["kind"] == "gap"]
    assert (gap["lost"], gap["cause"], gap["turns"][0]["tenant"]) == (1, "worker", "default")
    known = {each["message_id"] for each in records if each["kind"] == "turn"}
    assert len(known) == 3 and gap["turns"][0]["message_id"] not in known


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.nightly)]
)
def test_streams_under_way_are_finished(tmp_path: Path, number: signal.Signals) -> None:
    """A signal to the supervisor alone ends both workers after their streams; then it exits."""
    with slow(tmp_path) as (running, engine), running.clients() as clients:
        engine.answers = [chat_stream(*["x"] * 20, pause_s=STREAM_S / 20) for _ in range(2)]
        with ThreadPoolExecutor() as pool:
            begun = [threading.Event(), threading.Event()]
            under_way = [*map(pool.submit, [stream] * 2, clients, begun)]
            assert all(each.wait(30) for each in begun)
            assert running.end(number) == 0
            assert all(each.result()[1].endswith(DONE) for each in under_way)
        with pytest.raises(httpx.ConnectError):
            httpx.get(running.origin)


@pytest.mark.nightly
def test_no_worker_outlives_its_supervisor(tmp_path: Path) -> None:
    """A killed supervisor takes workers and engine along, within seconds."""
    running = Fleet(tmp_path)
    running.wait_ready()
    children = Path(f"/proc/{running.process.pid}/task/{running.process.pid}/children")
    pids = [int(each) for each in children.read_text(encoding="ascii").split()]
    assert len(pids) == 3
    running.end(signal.SIGKILL)
    wait(lambda: not any(map(alive, pids)), seconds=30)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--model", "no-such-model"], "no-such-model"),
        (["--policy", "no_such_policy", "--upstream", "http://127.0.0.1:9"], "no_such_policy"),
    ],
)
def test_what_is_wrong_is_said_once(flags: list[str], said: str) -> None:
    """Settings that can't work end the start with one line that names them."""
    done = subprocess.run(
        [LEYLINE, "serve", "--port", "0", "--workers", "2", *flags],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    told = [line for line in done.stderr.splitlines() if line.startswith("leyline serve:")]
    assert done.returncode == 2, done.stderr
    assert len(told) == 1 and said in done.stderr and "Traceback" not in done.stderr
