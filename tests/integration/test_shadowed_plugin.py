"""A folder in the current directory that is named like an installed plugin's module."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from support.fake_engine import MODEL, FakeEngine
from support.redis_server import free_port
from support.waiting import wait

from leyline_lab.stand_ins.serving import serving

LEYLINE = str(Path(sys.executable).parent / "leyline")
TALK = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
PLUGIN = """\
from leyline_policies import map_text


def shouting(messages, turn_idx):
    return [map_text(message, str.upper) for message in messages]
"""
SHADOW = """\
from pathlib import Path

Path(__file__).with_name("ran").write_text("code of the folder ran")


def shouting(messages, turn_idx):
    return messages
"""


def _installed(site: Path) -> None:
    """Write what an installer leaves of a package with one policy."""
    record = site / "leyline_shouting-1.0.dist-info"
    record.mkdir(parents=True)
    (record / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: leyline-shouting\nVersion: 1.0\n"
    )
    entry = "[leyline.policies]\nshouting = shouting_policy:shouting\n"
    (record / "entry_points.txt").write_text(entry)
    (site / "shouting_policy.py").write_text(PLUGIN)


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_the_installed_plugin_runs_and_not_the_folder(tmp_path: Path, workers: int) -> None:
    """Whatever the number of workers, a policy's module is found where it is installed, and code in
    the current directory isn't run."""
    site, here = tmp_path / "site", tmp_path / "here"
    _installed(site)
    shadow = here / "shouting_policy"
    shadow.mkdir(parents=True)
    (shadow / "__init__.py").write_text(SHADOW)
    engine, port = FakeEngine(), free_port()
    path = os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))
    with serving(engine) as origin, (tmp_path / "log").open("wb") as log:
        command = [LEYLINE, "serve", "--upstream", origin, "--port", str(port)]
        process = subprocess.Popen(
            [*command, "--workers", str(workers), "--policy", "shouting"],
            cwd=here,
            env={**os.environ, "PYTHONPATH": path},
            stdout=log,
            stderr=log,
        )
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
                wait(lambda: _answers(client, process), seconds=120)
                for _ in range(4):
                    assert client.post("/v1/chat/completions", json=TALK).status_code == 200
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
    assert "HELLO" in engine.bodies[-1].decode()
    assert not any("hello" in body.decode() for body in engine.bodies)
    assert not (shadow / "ran").exists()


def _answers(client: httpx.Client, process: subprocess.Popen[bytes]) -> bool:
    assert process.poll() is None
    try:
        return client.get("/readyz").status_code == 200
    except httpx.TransportError:
        return False
