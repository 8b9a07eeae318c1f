"""``audit_on_fault: refuse``: without its log, the proxy serves nothing that it would record."""

from __future__ import annotations

import json
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.redis_server import free_port
from support.stack import embedded_stack
from support.waiting import wait
from support.worker_fleet import LEYLINE, Fleet, fleet

CHAT = "/v1/chat/completions"
ADMIN_KEY = "admin-key-of-the-tests"
AUDIT_KEY = "a key that seals the log"
MOST = 40_000
"""Bytes of a file; the processes' own lines are fewer."""
REQUEST: dict[str, Any] = {
    "model": "leyline-recall",
    "messages": [{"role": "user", "content": "Hi."}],
    "max_tokens": 2,
}


@pytest.fixture(
    params=[pytest.param(1, id="one process", marks=pytest.mark.nightly), pytest.param(2, id="two")]
)
def running(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Fleet]:
    """A proxy that refuses, and its admin API."""
    started = Fleet(
        tmp_path,
        "--audit-file",
        str(tmp_path / "audit.jsonl"),
        "--audit-turns",
        "all",
        "--admin-port",
        str(free_port()),
        workers=request.param,
        LEYLINE_AUDIT_ON_FAULT="refuse",
        LEYLINE_LOG_LEVEL="error",
        LEYLINE_AUDIT_KEY=AUDIT_KEY,
        LEYLINE_ADMIN_KEY=ADMIN_KEY,
    )
    try:
        started.wait_ready()
        yield started
    finally:
        started.close()


def limit_files(proxy: Fleet, most: int) -> None:
    """Let the process that writes the log make files of this size at most."""
    hard = resource.prlimit(proxy.process.pid, resource.RLIMIT_FSIZE)[1]
    resource.prlimit(proxy.process.pid, resource.RLIMIT_FSIZE, (most, hard))


def test_a_log_that_cannot_be_written_closes_the_proxy_until_it_can(
    running: Fleet, tmp_path: Path
) -> None:
    """Requests and commands get 503 with the reason, reads are answered, and the log has a gap."""
    log = tmp_path / "audit.jsonl"
    with httpx.Client(base_url=running.origin, timeout=60) as client:

        def status() -> int:
            return client.post(CHAT, json=REQUEST).status_code

        assert status() == httpx.codes.OK
        limit_files(running, MOST)
        # Each worker learns of it a moment later than the one that asked.
        wait(lambda: {status() for _ in range(8)} == {httpx.codes.SERVICE_UNAVAILABLE}, seconds=30)
        refused = client.post(CHAT, json=REQUEST)
        error = refused.json()["error"]
        assert error["code"] == "audit_unavailable"
        assert "audit_on_fault" in error["message"]
        assert str(tmp_path) not in error["message"]
        assert int(refused.headers["retry-after"]) > 0
        shaped = client.post("/v1/messages", json=REQUEST)
        assert shaped.json()["type"] == "error"
        assert client.get("/v1/models").status_code == httpx.codes.OK
        ready = client.get("/readyz")
        assert ready.status_code == httpx.codes.SERVICE_UNAVAILABLE
        assert ready.json()["audit"]["problem"]
        hard = resource.prlimit(running.process.pid, resource.RLIMIT_FSIZE)[1]
        limit_files(running, hard)
        wait(lambda: status() == httpx.codes.OK, seconds=60)
        assert client.get("/readyz").json()["audit"]["problem"] is None
    running.end()
    checked = subprocess.run(
        [LEYLINE, "audit", "verify", str(log), "--json"],
        env={"LEYLINE_AUDIT_KEY": AUDIT_KEY, "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    (found,) = json.loads(checked.stdout)
    assert found["good"], checked.stdout
    assert found["lost"] >= 1


def test_a_log_that_cannot_be_opened_refuses_until_it_can(tmp_path: Path) -> None:
    """The proxy starts, says so in the error, /readyz and a metric, and goes on by itself."""
    folder = tmp_path / "later"
    options: dict[str, Any] = {"audit_file": folder / "audit.jsonl", "audit_on_fault": "refuse"}
    with (
        embedded_stack({"device": "cpu"}, log_level="error", **options) as origin,
        httpx.Client(base_url=origin, timeout=60) as client,
    ):
        refused = client.post(CHAT, json=REQUEST)
        assert refused.status_code == httpx.codes.SERVICE_UNAVAILABLE
        message = refused.json()["error"]["message"]
        assert "No such file or directory" in message and "give the proxy access" in message
        assert not client.get("/readyz").json()["ready"]
        assert "\nleyline_audit_up 0.0\n" in client.get("/metrics").text
        folder.mkdir()
        wait(lambda: client.get("/readyz").json()["ready"], seconds=60)
        assert client.post(CHAT, json=REQUEST).status_code == httpx.codes.OK
        assert "\nleyline_audit_up 1.0\n" in client.get("/metrics").text


@pytest.mark.nightly
def test_workers_know_that_the_supervisors_log_fails(tmp_path: Path) -> None:
    """By default, too, /readyz and the metric have the problem, and requests are served."""
    folder = tmp_path / "later"
    with (
        fleet(tmp_path, "--audit-file", str(folder / "audit.jsonl")) as running,
        httpx.Client(base_url=running.origin, timeout=60) as client,
    ):

        def up() -> bool:
            return "\nleyline_audit_up 1.0\n" in client.get("/metrics").text

        wait(lambda: client.get("/readyz").json()["audit"]["problem"])
        assert not up()
        assert client.post(CHAT, json=REQUEST).status_code == httpx.codes.OK
        folder.mkdir()
        wait(up, seconds=60)
        assert client.get("/readyz").json()["audit"]["problem"] is None


def test_by_default_a_log_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    """Requests are served; the metric and /readyz have the problem."""
    options: dict[str, Any] = {"audit_file": tmp_path / "never" / "audit.jsonl"}
    with (
        embedded_stack({"device": "cpu"}, log_level="error", **options) as origin,
        httpx.Client(base_url=origin, timeout=60) as client,
    ):
        assert client.post(CHAT, json=REQUEST).status_code == httpx.codes.OK
        ready = client.get("/readyz").json()
        assert ready["ready"] and ready["audit"]["problem"]
        assert "\nleyline_audit_up 0.0\n" in client.get("/metrics").text
