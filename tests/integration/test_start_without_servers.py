"""``leyline serve`` where Redis and engine aren't there yet: it starts, says so, and recovers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
from redis import Redis
from support.redis_server import RedisServer, free_port
from support.waiting import wait

from leyline_lab.stand_ins.serving import serving
from leyline_proxy.upstream.embedded import create_embedded_engine

LEYLINE = str(Path(sys.executable).parent / "leyline")
PASSWORD = "redis-password-of-the-test"
WAIT_S = 90.0


def ready(url: str) -> tuple[int, dict[str, Any]]:
    """Status and document of ``/readyz``; 0 before the proxy listens."""
    try:
        answer = httpx.get(f"{url}/readyz", timeout=10)
    except httpx.TransportError:
        return 0, {}
    return answer.status_code, answer.json()


def ask(url: str) -> httpx.Response:
    """One chat request."""
    messages = [{"role": "user", "content": "Hello."}]
    body = {"model": "leyline-recall", "messages": messages, "max_tokens": 2}
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)


def test_it_starts_without_redis_and_engine_and_finds_them_later(tmp_path: Path) -> None:
    """Readiness and the log say what is missing, requests get errors, and the proxy needs no
    restart when Redis and the engine come; the password is nowhere."""
    redis = RedisServer(tmp_path, "--requirepass", PASSWORD)
    port, engine_port = free_port(), free_port()
    url = f"http://127.0.0.1:{port}"
    command = [
        *(LEYLINE, "serve", "--port", str(port)),
        *("--upstream", f"http://127.0.0.1:{engine_port}"),
    ]
    store = f"redis://:{PASSWORD}@127.0.0.1:{redis.port}/0"
    environ = {
        **os.environ,
        "LEYLINE_SESSION_STORE": store,
        "LEYLINE_SESSION_SECRET": "session-secret-of-the-test",
    }
    log = tmp_path / "proxy.log"
    with (
        log.open("w") as output,
        subprocess.Popen(command, stdout=output, stderr=output, env=environ) as process,
    ):
        try:
            wait(lambda: ready(url)[0] != 0)
            wait(lambda: bool(ready(url)[1]["sessions"]["problem"]))
            status, document = ready(url)
            assert status == 503
            assert document["upstreams"][0]["up"] is False
            assert document["sessions"]["up"] is False
            assert httpx.get(f"{url}/healthz").status_code == 200
            refused = ask(url)
            assert refused.status_code == 502
            assert refused.json()["error"]["code"] == "upstream_unreachable"

            with serving(create_embedded_engine("replay", {}), engine_port):
                wait(lambda: ready(url)[0] == 200)
                assert ready(url)[1]["sessions"]["up"] is False
                alone = ask(url)
                redis.start()
                wait(lambda: ready(url)[1]["sessions"]["up"])
                together = ask(url)
            for answer in (alone, together):
                assert answer.status_code == 200, answer.text
            with Redis(port=redis.port, password=PASSWORD) as client:
                assert client.keys("leyline:*")
        finally:
            process.kill()
            redis.kill()
    text = log.read_text()
    assert PASSWORD not in text
    events = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    told = [event["event"] for event in events]
    assert "session_store_gone" in told
    assert "session_store_up" in told
    assert {event["up"] for event in events if event["event"] == "engine_status"} == {False, True}


def test_serve_names_the_line_and_the_fix(tmp_path: Path) -> None:
    """A broken configuration ends the command with 2, the line and the fix, and no traceback."""
    config = tmp_path / "leyline.yaml"
    config.write_text(f"port: 8790\nupstreams:\n  a: {{url: gpu1}}\nadmin_kee: {PASSWORD}\n")
    command = [LEYLINE, "serve", "--config", str(config)]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert f"{config}:3:7: upstreams.a.url: must start with http://" in ended.stderr
    assert (
        f"{config}:4:1: admin_kee is not a setting\n  fix: Did you mean 'admin_key'" in ended.stderr
    )
    assert PASSWORD not in ended.stderr
    assert "Traceback" not in ended.stderr + ended.stdout
