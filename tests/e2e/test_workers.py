"""``leyline serve --workers 2``: two processes behind one port are one proxy."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.agent_history import agent_history
from support.waiting import wait
from support.worker_fleet import LEYLINE, Fleet, fleet
from websockets.asyncio.client import ClientConnection, connect

CHAT = "/v1/chat/completions"
RED, BLUE = "key-of-the-red-tenant", "key-of-the-blue-tenant"
ADMIN = {"authorization": "Bearer admin-key-of-the-tests"}
AUDIT_KEY = "a key that seals the log"
MODEL = "leyline-recall"
TURNS = 4
OWN = "A task that no other test has."


def key(value: str) -> dict[str, str]:
    """The header of a key."""
    return {"authorization": f"Bearer {value}"}


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of keys."""
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text(f"red:{RED}\nblue:{BLUE}\n")
    path.chmod(0o600)
    return path


@pytest.fixture(scope="module")
def audit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The audit log."""
    return tmp_path_factory.mktemp("audit") / "audit.jsonl"


@pytest.fixture(scope="module")
def admin_port() -> int:
    """The admin port."""
    from support.redis_server import free_port

    return free_port()


@pytest.fixture(scope="module")
def two(
    tmp_path_factory: pytest.TempPathFactory, keys: Path, audit: Path, admin_port: int
) -> Iterator[Fleet]:
    """Two workers and the embedded engine, for two tenants."""
    flags = ["--api-keys-file", str(keys), "--admin-port", str(admin_port)]
    flags += ["--audit-file", str(audit), "--audit-turns", "all", "--undeclared", "tool=amortize"]
    environment = {"LEYLINE_ADMIN_KEY": ADMIN["authorization"].removeprefix("Bearer ")}
    environment["LEYLINE_AUDIT_KEY"] = AUDIT_KEY
    with fleet(tmp_path_factory.mktemp("workers"), *flags, **environment) as running:
        yield running


def turn(
    client: httpx.Client, session: str, messages: list[dict[str, Any]], tenant: str = RED
) -> dict[str, Any]:
    """One turn of a session; returns its account."""
    body = {"model": MODEL, "messages": messages, "max_tokens": 2, "temperature": 0}
    headers = {"x-leyline-session": session, **key(tenant)}
    answer = client.post(CHAT, json=body, headers=headers)
    assert answer.status_code == httpx.codes.OK, answer.text
    account: dict[str, Any] = answer.json()["leyline"]
    return account


def history(turns: int, task: str = "Begin.", *, cut: bool = False) -> list[dict[str, Any]]:
    """An agent's history; ``cut`` shortens its first result."""
    messages = agent_history(turns, task, secret="the long middle", lines=40)
    if cut:
        messages[3] = {**messages[3], "content": "cut"}
    return messages


def test_a_session_continues_on_either_worker(two: Fleet) -> None:
    """Turns alternate between the workers; each finds the last one, and an edit is spliced."""
    with two.clients() as (first, second):
        for number in range(1, TURNS):
            account = turn((first, second)[number % 2], "alternating", history(number))
            assert account["turn_index"] == number - 1
        edited = turn((first, second)[TURNS % 2], "alternating", history(TURNS, cut=True))
    assert edited["outcome"] == "spliced", edited
    assert edited["tokens"]["spliced"] > 0
    two.wait_served("alternating", {0, 1})


def test_a_conversation_without_a_name_is_found_by_its_history(two: Fleet) -> None:
    """Worker 1 finds by its messages the session that worker 0 began."""
    body = {"model": MODEL, "max_tokens": 2, "temperature": 0}
    with two.clients(headers=key(RED)) as (first, second):
        begun = first.post(CHAT, json={**body, "messages": history(2)}).json()["leyline"]
        found = second.post(CHAT, json={**body, "messages": history(3)}).json()["leyline"]
    assert (found["session"], found["turn_index"]) == (begun["session"], begun["turn_index"] + 1)


async def test_a_websocket_continues_on_either_worker(two: Fleet) -> None:
    """A stored response of worker 0's connection is continued over worker 1's."""
    url = two.origin.replace("http", "ws") + "/v1/responses"
    asked = {"type": "response.create", "model": MODEL, "max_output_tokens": 2}
    last: dict[str, Any] = {}
    async with AsyncExitStack() as stack:
        sockets: dict[int, ClientConnection] = {}
        while len(sockets) < 2:  # a connection that has ended may count for a moment
            connection = connect(url, additional_headers=key(RED), proxy=None)
            socket = await stack.enter_async_context(connection)
            sockets.setdefault(two.worker_of(socket.local_address[1]), socket)
        for socket in sockets.values():
            more = {"previous_response_id": last["id"]} if last else {}
            await socket.send(json.dumps({**asked, "input": "Over WebSocket.", **more}))
            while not last or last["id"] == more.get("previous_response_id"):
                event = json.loads(await socket.recv())
                if event["type"] in ("response.completed", "response.incomplete"):
                    last = event["response"]
    assert last["leyline"]["turn_index"] == 1
    two.wait_served(last["leyline"]["session"], {0, 1})


def test_tenants_are_apart(two: Fleet) -> None:
    """A session's name is another session for another tenant, whichever worker has it."""
    with two.clients() as (first, second):
        turn(first, "same name", history(1), RED)
        turn(second, "same name", history(2), RED)
        assert turn(second, "same name", history(3, cut=True), BLUE)["turn_index"] == 0


def test_every_live_page_shows_every_turn(two: Fleet) -> None:
    """Viewers at both workers see a turn of one of them; another tenant's sees only its own."""
    seen: dict[str, list[str]] = {"first": [], "second": [], "blue": []}
    begun = threading.Barrier(4)

    def watch(name: str, client: httpx.Client, tenant: str) -> None:
        with client.stream("GET", "/v1/leyline/live", headers=key(tenant)) as stream:
            lines = stream.iter_lines()
            for line in lines:
                if line.startswith("event: snapshot"):
                    break
            begun.wait(30)
            kind = ""
            for line in lines:
                kind = line.removeprefix("event: ") if line.startswith("event: ") else kind
                if line.startswith("data: ") and kind == "turn":
                    seen[name].append(json.loads(line.removeprefix("data: "))["session"]["id"])
                if seen[name]:
                    return

    with two.clients() as (first, second), httpx.Client(base_url=two.origin, timeout=60) as blue:
        viewers = [
            threading.Thread(target=watch, args=each)
            for each in (("first", first, RED), ("second", second, RED), ("blue", blue, BLUE))
        ]
        for viewer in viewers:
            viewer.start()
        begun.wait(30)
        with httpx.Client(base_url=two.origin, timeout=60) as agent:
            turn(agent, "watched", history(1))
            turn(agent, "blue-own", history(1), BLUE)
        for viewer in viewers:
            viewer.join(20)
    assert seen == {"first": ["watched"], "second": ["watched"], "blue": ["blue-own"]}


def test_what_an_operator_does_holds_for_all(two: Fleet, keys: Path, admin_port: int) -> None:
    """A drained engine is drained at each worker, and a new key is known to each."""
    admin = httpx.Client(base_url=f"http://127.0.0.1:{admin_port}/admin", headers=ADMIN)
    new = "another-key-of-the-red-tenant"
    with admin, two.clients() as (first, second):
        admin.post("/upstreams/engine/drain").raise_for_status()
        assert states(first) == states(second) == {True}
        admin.post("/upstreams/engine/resume").raise_for_status()
        assert states(first) == states(second) == {False}
        keys.write_text(keys.read_text() + f"red:{new}\n")
        told = admin.post("/reload").raise_for_status().json()
        assert told["api_keys"] == {"loaded": True, "problem": None}
        for client in (first, second):
            assert client.get("/v1/models", headers=key(new)).status_code == httpx.codes.OK
        sessions = admin.get("/sessions", params={"tenant": "red"}).json()
    assert "alternating" in {line["id"] for line in sessions["sessions"]}


def states(client: httpx.Client) -> set[bool]:
    """The states of draining that a worker shows."""
    found = client.get("/readyz").json()["upstreams"]
    return {each["draining"] for each in found}


def test_the_supervisor_sets_no_gauge(two: Fleet) -> None:
    """It has the audit log's counters; stores and log are up as the workers see them."""
    with httpx.Client(base_url=two.origin, headers=key(RED)) as client:

        def shown() -> set[str]:
            return set(client.get("/metrics").text.splitlines())

        wait(lambda: {"leyline_session_store_up 1.0", "leyline_audit_up 1.0"} <= shown())


def test_metrics_are_those_of_all(two: Fleet) -> None:
    """Either worker's page counts the requests of both."""
    with two.clients() as (first, second):
        before = requests(first)
        turn(first, "counted", history(1))
        turn(second, "counted", history(2))
        # A request counts once it has ended, which its client doesn't wait for.
        wait(lambda: [requests(client) for client in (first, second)] == [before + 2] * 2)


def requests(client: httpx.Client) -> float:
    """The number of answered turns on the page of metrics."""
    text = client.get("/metrics", headers=key(RED)).text
    return sum(
        float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if line.startswith("leyline_requests_total{") and 'status="200"' in line and CHAT in line
    )


def of_processes(client: httpx.Client, metric: str) -> dict[str, float]:
    """A metric of the system's by process."""
    text = client.get("/metrics", headers=key(RED)).text
    found = re.findall(rf'^{metric}{{process="(.+?)"}} (\S+)$', text, re.MULTILINE)
    return {name: float(value) for name, value in found}


def test_each_process_has_its_series(two: Fleet) -> None:
    """Either worker shows what the system counts for the supervisor, the workers and the engine,
    each once, so that they add up to what the machine gives."""
    names = {"supervisor", "worker 0", "worker 1", "engine"}
    with two.clients() as both:
        for client in both:
            for metric in ("process_open_fds", "process_max_fds", "process_cpu_seconds_total"):
                assert of_processes(client, metric).keys() == names
            shown = of_processes(client, "process_resident_memory_bytes")
            children = Path(f"/proc/{two.process.pid}/task/{two.process.pid}/children")
            pids = [two.process.pid, *map(int, children.read_text().split())]
            status = "\n".join(Path(f"/proc/{pid}/status").read_text() for pid in pids)
            resident = sum(map(int, re.findall(r"^VmRSS:\s+(\d+) kB$", status, re.MULTILINE)))
            assert shown.keys() == names
            assert sum(shown.values()) == pytest.approx(1024 * resident, rel=0.05)


def test_the_audit_log_is_one_chain(two: Fleet, audit: Path) -> None:
    """Both workers' turns are in one file, whose chain is whole."""
    turns = len([line for line in two.lines("turn") if "turn" in line])
    deadline = time.monotonic() + 20
    while len(recorded(audit)) < turns:
        assert time.monotonic() < deadline, (turns, recorded(audit))
        time.sleep(0.1)
    checked = subprocess.run(
        [LEYLINE, "audit", "verify", str(audit)],
        env={"LEYLINE_AUDIT_KEY": AUDIT_KEY},
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def recorded(audit: Path) -> list[str]:
    """The sessions of the log's turns."""
    records = [json.loads(line) for line in audit.read_text(encoding="utf-8").splitlines()]
    found = [record.get("record", record) for record in records]
    return [record["session"] for record in found if record.get("kind") == "turn"]


def test_a_worker_that_dies_loses_no_session(two: Fleet) -> None:
    """Sessions of a killed worker continue at once on the other, and on its successor."""
    with two.clients() as (first, second):
        for number in range(1, TURNS):
            turn(first, "outlives", history(number, OWN))
        before = two.pids()
        subprocess.run(["kill", "-KILL", str(before[0])], check=True)
        edited = turn(second, "outlives", history(TURNS, OWN, cut=True))
    assert (edited["turn_index"], edited["outcome"]) == (TURNS - 1, "spliced"), edited
    deadline = time.monotonic() + 60
    while len(two.lines("Application startup complete")) < 4:  # engine, two workers, successor
        assert time.monotonic() < deadline, two.log.read_text()
        time.sleep(0.1)
    assert two.pids()[0] != before[0] and two.pids()[1] == before[1]
    with two.clients() as both:
        for client in both:
            turn(client, "outlives", history(TURNS + 1, OWN, cut=True))
            started = of_processes(client, "process_start_time_seconds")
            assert started.keys() == {"supervisor", "worker 0", "worker 1", "engine"}
            assert started["worker 0"] > started["worker 1"]
    assert signal.SIGKILL == 9 and [line["status"] for line in two.lines("process_died")] == [-9]
