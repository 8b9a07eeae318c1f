"""The command: help that teaches, errors with exit codes, and a real start and stop."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

import httpx
import msgspec
import pytest
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send
from structlog.testing import capture_logs
from support.fake_engine import CAPABILITY, FakeEngine
from typer.testing import CliRunner

from leyline_engine.contract import Plugin, Refusal
from leyline_lab.stand_ins.serving import serving
from leyline_proxy.cli import build_app
from leyline_proxy.upstream import embedded

LEYLINE = str(Path(sys.executable).parent / "leyline")


@pytest.fixture(autouse=True)
def _keep_logging(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands configure the process's logging, which here is pytest's."""
    monkeypatch.setattr("leyline_proxy.telemetry.logging.configure_logging", lambda *_: None)


def run(*arguments: str) -> tuple[int, str]:
    """Exit code and output of ``leyline``."""
    result = CliRunner().invoke(build_app(), list(arguments))
    return result.exit_code, result.output


def test_help_names_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    """Defaults in brackets are shown as text, not taken for markup."""
    monkeypatch.setenv("COLUMNS", "200")
    for command in ("serve", "replay", "demo"):
        assert "hub id [leyline-recall]" in run(command, "--help")[1]
    assert "[exact]" in run("serve", "--help")[1]


def test_help_teaches_by_example() -> None:
    """Each command's help shows a line to copy."""
    assert "leyline serve" in run("--help")[1]
    assert "truncate_older_than" in run("serve", "--help")[1]
    assert "doctor http" in run("doctor", "--help")[1]
    assert run("--version")[1].strip()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--policy", "truncate_older"), "truncate_older_than"),
        (("--undeclared", "tool"), "ROLE=MODE"),
        (("--undeclared", "wizard=amortize"), "wizard"),
        (("--port", "99999"), "port"),
        (("--upstream", "gpu1:30000"), "http://"),
        (("--engine", "replai"), "replay"),
        (("--engine-option", "hunter2"), "NAME=VALUE"),
        (("--engine-option", "x=[hunter2"), "x isn't YAML"),
        (
            ("--upstream", "http://u:hunter2@h", "--upstream", "http://hunter2@h"),
            "h is given twice",
        ),
        (("--api-key", "hunter2"), "tenant:key"),
        (("--config", "/nowhere.yaml"), "nowhere"),
        (
            ("--tls-cert", "/nowhere.crt", "--tls-key", "/nowhere.key"),
            "--tls-cert: tls_cert /nowhere.crt can't be read: No such file or directory\n"
            "  fix: Correct that file, or name another one.",
        ),
        (
            ("--audit-file", "audit.log", "--audit-key-file", "/nowhere.key"),
            "--audit-key-file: audit_key_file /nowhere.key can't be read",
        ),
        (("--policy", "no-such"), "--policy: policy: no policy is called 'no-such'"),
    ],
)
def test_wrong_settings_exit_with_2(
    arguments: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator's mistake is reported in a line, with the closest names, and exits with 2: in
    front of an engine that takes long to load."""
    if "--engine" not in arguments:
        monkeypatch.setattr(embedded, "create_embedded_engine", _no_time_for_that)
    code, output = run("serve", *arguments)
    assert code == 2
    assert words in output
    assert "hunter2" not in output
    assert "Traceback" not in output


@pytest.mark.parametrize("flag", ["--port", "--admin-port"])
def test_a_taken_port_is_found_before_the_model_is_loaded(
    flag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for an engine that can't be served."""
    monkeypatch.setattr(embedded, "create_embedded_engine", _no_time_for_that)
    monkeypatch.setenv("LEYLINE_ADMIN_KEY", "admin-key-0123456789")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = {"--port": "0", flag: str(taken.getsockname()[1])}
        code, output = run("serve", *(word for pair in ports.items() for word in pair))
    assert code == 2
    assert "Another program listens there" in output


def test_a_terminal_shows_the_banner_first() -> None:
    """The logs of the start come after it, without members that say nothing."""
    ours, theirs = pty.openpty()
    command = [LEYLINE, "serve", "--port", "0", "--upstream", "http://127.0.0.1:9"]
    shown = ""
    try:
        with subprocess.Popen(command, stdout=theirs, stderr=theirs) as process:
            deadline = time.monotonic() + 60
            while "engine_status" not in shown and time.monotonic() < deadline:
                if select.select([ours], [], [], 1.0)[0]:
                    shown += os.read(ours, 65536).decode()
            process.send_signal(signal.SIGINT)  # at once
    finally:
        os.close(ours)
        os.close(theirs)
    assert shown.lstrip().removeprefix("\x1b[1m").startswith("Leyline is up.")
    banner, logs = shown.split("live page")
    assert "base_url" in banner and "[" not in banner.split("base_url")[1].split("/v1")[0]
    assert "engine_status" in logs and "None" not in logs and "application startup" not in logs


def test_workers_begin_only_with_good_files() -> None:
    """The process above them reports the fault once, with its place and its fix."""
    command = [LEYLINE, "serve", "--port", "0", "--workers", "2", "--api-keys-file", "/nowhere"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr == (
        "leyline serve: --api-keys-file: api_keys_file /nowhere can't be read: "
        "No such file or directory\n  fix: Correct that file, or name another one.\n"
    )


def _no_time_for_that(*_: object) -> NoReturn:
    """Stands in for what takes long."""
    raise AssertionError


def test_a_misspelt_variable_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is passed over, which would go unnoticed where it was to keep callers out."""
    monkeypatch.setenv("LEYLINE_API_KEY", "red:hunter2")
    with capture_logs() as logged:
        code, output = run("serve", "--upstream", "http://127.0.0.1:9", "--policy", "no-such")
    assert code == 2
    (found,) = [each for each in logged if each["event"] == "variable_ignored"]
    assert found["variable"] == "LEYLINE_API_KEY"
    assert "LEYLINE_API_KEYS" in found["fix"]
    assert "hunter2" not in f"{found} {output}"


def test_doctor_tells_who_splices() -> None:
    """Exit code 0 and a table for an engine that splices; 1 and a reason for all others."""
    engine = FakeEngine()

    async def measured(scope: Scope, receive: Receive, send: Send) -> None:
        shows = scope["type"] == "http" and scope["path"] == "/metrics"
        app = PlainTextResponse("sglang_up 1\n") if shows else engine
        await app(scope, receive, send)

    with serving(measured) as origin:
        code, output = run("doctor", origin)
        assert (code, "This engine splices" in output) == (0, True)
        code, output = run("doctor", f"{origin}/v1", "--json")
        assert (code, json.loads(output)["engine"]) == (0, "fake")
        assert "reasoning_edits" not in json.loads(output), "an engine has no such setting"
        engine.capability = type(CAPABILITY)(
            **{
                name: getattr(CAPABILITY, name)
                for name in ("engine", "engine_version", "model", "model_fingerprint")
            },
            architecture="None",
            vocab_size=1,
            max_context=1,
            splices=False,
            unsupported_reason="its KV is FP8; LMCache",
            refusals=(
                Refusal("its KV is FP8", "start with --kv-cache-dtype bf16"),
                Refusal("LMCache"),
            ),
        )
        code, output = run("doctor", origin)
        assert (code, "its KV is FP8; LMCache" in output) == (1, True)
        assert "  its KV is FP8: start with --kv-cache-dtype bf16" in output
        assert "  LMCache: the engine names no remedy" in output
        engine.capability = msgspec.structs.replace(CAPABILITY, plugin=Plugin(version="0.0.1"))
        code, output = run("doctor", origin)
        assert (code, "This engine splices" in output) == (1, False)
        assert "plugin_too_old" in output and "upgrade the plugin" in output
        code, output = run("doctor", origin, "--json")
        assert (code, json.loads(output)["mismatch"]["reason"]) == (1, "plugin_too_old")
        engine.capability = None
        code, output = run("doctor", origin)
        assert (code, "without the Leyline plugin" in output) == (1, True)
    code, output = run("doctor", "http://127.0.0.1:9", "--json")
    assert (code, json.loads(output)["splices"]) == (1, False)


def test_serve_prints_where_it_is_and_stops(tmp_path: Path) -> None:
    """With port 0 a free one is taken and printed; SIGTERM ends it cleanly."""
    command = [LEYLINE, "serve", "--port", "0"]
    log = (tmp_path / "log").open("w")
    with log, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as process:
        try:
            assert process.stdout is not None
            lines: list[str] = []
            deadline = time.monotonic() + 120
            while not lines or "live page" not in lines[-1]:
                assert time.monotonic() < deadline
                line = process.stdout.readline()
                assert line, (tmp_path / "log").read_text()
                lines.append(line)
            shown = dict(line.split(maxsplit=1) for line in lines[1:5])
            assert shown["splices"].strip() == "yes"
            url = shown["base_url"].strip()
            assert httpx.get(f"{url}/models").status_code == 200
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            process.kill()
    for line in (tmp_path / "log").read_text().splitlines():
        if line.startswith("{"):
            json.loads(line)
