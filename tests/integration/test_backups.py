"""Backups of Redis by the commands of docs/backups.md: what a restored server has, and hasn't."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.agent_history import agent_history
from support.redis_server import RedisServer, program, redis_server

from leyline_lab.stand_ins.serving import serving
from leyline_proxy.http.app import create_app
from leyline_proxy.settings import Settings
from leyline_proxy.upstream.embedded import create_embedded_engine

PAGE = Path(__file__).parents[2] / "docs" / "backups.md"
SECRET = "a secret of the tests that is long"
SPLICE = {"undeclared": {"tool": "amortize"}}


def command(pattern: str, server: RedisServer, backup: Path, folder: Path) -> list[str]:
    """The page's one command that begins so, with the test's places."""
    (found,) = re.findall(rf"^({pattern}.*)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    places = {
        "-p 6379": f"-p {server.port}",
        "/var/lib/leyline/backup": str(backup),
        "/var/lib/redis": str(folder),
    }
    for place, here in places.items():
        found = found.replace(place, here)
    name, *words = shlex.split(found)
    return [program(name) if name.startswith("redis") else name, *words]


def run(*words: str) -> None:
    """Run a command, which must succeed."""
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr


@contextmanager
def proxy(origin: str, server: RedisServer, secret: str = SECRET) -> Iterator[httpx.Client]:
    """A proxy with sessions in a Redis."""
    settings = Settings(
        upstream=origin,
        session_store=server.url,
        session_secret=[secret],
        redis_timeout_s=2.0,
        log_level="error",
    )
    with (
        serving(create_app(settings)) as address,
        httpx.Client(base_url=address, timeout=60) as client,
    ):
        yield client


def turn(client: httpx.Client, turns: int, *, cut: bool = False, **options: Any) -> dict[str, Any]:
    """The account of a turn of the one session."""
    messages = agent_history(turns, "Begin.", secret="the long middle", lines=40)
    if cut:
        messages[3] = {**messages[3], "content": "cut"}
    body = {"model": "leyline-recall", "messages": messages, "max_tokens": 2, "leyline": options}
    headers = {"x-leyline-session": "kept"}
    answer = client.post("/v1/chat/completions", json=body, headers=headers)
    assert answer.status_code == httpx.codes.OK, answer.text
    account: dict[str, Any] = answer.json()["leyline"]
    return account


@dataclass(frozen=True, slots=True)
class Kept:
    """An engine that has the session's KV, and the snapshot of the Redis that had the session."""

    engine: str
    backup: Path


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kept]:
    """Two turns, a snapshot while Redis runs, and a third turn that isn't in it; Redis is lost."""
    folder, backup = tmp_path_factory.mktemp("redis"), tmp_path_factory.mktemp("backup")
    replay = create_embedded_engine("replay", {"device": "cpu", "pool_tokens": 65_536})
    with serving(replay) as engine:
        with redis_server(folder, "--appendonly", "yes") as server, proxy(engine, server) as client:
            turn(client, 1)
            turn(client, 2)
            run(*command("redis-cli .*--rdb", server, backup, folder))
            turn(client, 3)
        shutil.rmtree(folder)
        yield Kept(engine, backup)
    replay.state.shutdown()


@contextmanager
def restored(kept: Kept, folder: Path) -> Iterator[RedisServer]:
    """A server that was restored as the page says."""
    (folder / "appendonlydir").mkdir()
    server = RedisServer(folder)
    run(*command("rm -rf /var/lib/redis", server, kept.backup, folder))
    run(*command("cp /var/lib/leyline/backup/redis.rdb", server, kept.backup, folder))
    words = command("redis-server --dir", server, kept.backup, folder)[1:]
    with redis_server(folder, *words) as server:
        run(*command("redis-cli .*CONFIG", server, kept.backup, folder))
        assert (folder / "appendonlydir").is_dir()
        yield server


def test_a_restored_session_continues_with_a_splice(kept: Kept, tmp_path: Path) -> None:
    """It continues after the snapshot's last turn, and the engine's KV is spliced."""
    with restored(kept, tmp_path) as server, proxy(kept.engine, server) as client:
        edited = turn(client, 3, cut=True, **SPLICE)
        assert (edited["turn_index"], edited["outcome"]) == (2, "spliced"), edited
        assert edited["tokens"]["spliced"] > 0


@pytest.mark.parametrize("case", ["another secret", "an empty Redis"])
def test_without_the_secret_or_the_data_the_session_starts_over(
    kept: Kept, tmp_path: Path, case: str
) -> None:
    """A backup is worth nothing without its secret: the edit is an ordinary prefill."""
    if case == "an empty Redis":
        with redis_server(tmp_path) as server, proxy(kept.engine, server) as client:
            account = turn(client, 3, cut=True, **SPLICE)
    else:
        other = "another secret of the tests"
        with (
            restored(kept, tmp_path) as server,
            proxy(kept.engine, server, other) as client,
        ):
            account = turn(client, 3, cut=True, **SPLICE)
    assert account["tokens"]["spliced"] == 0, account
