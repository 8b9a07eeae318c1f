"""A policy of one's own: written, installed, chosen by name, and seen in the metrics."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

# Installing and serving takes most of a minute; the parts are tested at each commit.
pytestmark = pytest.mark.nightly

LEYLINE = str(Path(sys.executable).parent / "leyline")
START_S = 120.0


def install(source: Path, target: Path) -> None:
    """Install a package as its author would, without a network."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    command += ["--no-index", "--no-deps", "--no-build-isolation", "--target", str(target)]
    result = subprocess.run([*command, str(source)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@contextmanager
def served(site: Path, log: Path, *flags: str) -> Iterator[str]:
    """The origin of ``leyline serve`` in a process that sees the installed packages."""
    environment = {**os.environ, "PYTHONPATH": str(site)}
    command = [LEYLINE, "serve", "--port", "0", *flags]
    with (
        log.open("w") as errors,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
        ) as process,
    ):
        try:
            yield _origin(process, log)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            finally:
                process.kill()


def _origin(process: subprocess.Popen[str], log: Path) -> str:
    assert process.stdout is not None
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        line = process.stdout.readline()
        assert line, log.read_text()
        name, _, value = line.strip().partition(" ")
        if name == "base_url":
            return value.strip().removesuffix("/v1")
    raise AssertionError("the proxy didn't say where it is")


def test_ten_lines_are_installed_chosen_and_counted(tmp_path: Path) -> None:
    """The policy of ``leyline policies new`` edits a conversation, and /metrics names it."""
    subprocess.run(
        [LEYLINE, "policies", "new", "short_pastes", "--dir", str(tmp_path)],
        check=True,
        capture_output=True,
    )
    site = tmp_path / "site"
    install(tmp_path / "short_pastes", site)
    with served(site, tmp_path / "log", "--policy", "short_pastes") as origin:
        model = httpx.get(f"{origin}/v1/models", timeout=10).json()["data"][0]["id"]
        messages = [{"role": "user", "content": "Look at this.\n" + "a long paste\n" * 400}]
        for question in ("And now?", "And then?"):
            body = {"model": model, "messages": messages, "max_tokens": 1}
            answer = httpx.post(f"{origin}/v1/chat/completions", json=body, timeout=60)
            assert answer.status_code == 200, answer.text
            assert answer.json()["leyline"]["policy_faults"] == []
            messages = [
                *messages,
                answer.json()["choices"][0]["message"],
                {"role": "user", "content": question},
            ]
        metrics = httpx.get(f"{origin}/metrics", timeout=10).text
    assert 'leyline_policy_messages_total{mode="amortize",policy="short_pastes"}' in metrics
