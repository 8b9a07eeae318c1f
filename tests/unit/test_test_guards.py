"""The rules that the test run itself is under."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

CONFTEST = Path(__file__).resolve().parent.parent / "conftest.py"
PYTEST_INI = "[pytest]\nmarkers =\n    gpu: needs a GPU\n"


def _run_pytest(folder: Path, body: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run ``body`` as a test file under this project's conftest, in a process of its own."""
    (folder / "tests").mkdir()
    (folder / "tests" / "conftest.py").write_text(CONFTEST.read_text())
    (folder / "tests" / "test_it.py").write_text(body)
    (folder / "pytest.ini").write_text(PYTEST_INI)
    base = {k: v for k, v in os.environ.items() if k not in ("CI", "LEYLINE_REQUIRE_TRACES")}
    base["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # they take seconds to load
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder / "tests")],
        cwd=folder,
        env=base | env,
        capture_output=True,
        text=True,
        check=False,
    )


def test_outside_connection_is_refused(network_guard: Any) -> None:
    """A TCP connection to a public address is refused before a packet leaves."""
    with (
        socket.socket() as outside,
        pytest.raises(RuntimeError, match=r"connection to 192\.0\.2\.1"),
    ):
        outside.connect(("192.0.2.1", 80))
    assert network_guard.drain() == ["connection to 192.0.2.1:80"]


def test_outside_lookup_is_refused(network_guard: Any) -> None:
    """A name that only DNS can resolve is refused, so no query leaves."""
    with pytest.raises(RuntimeError, match=r"look-up of example\.invalid"):
        urllib.request.urlopen("http://example.invalid/")
    assert network_guard.drain() == ["look-up of example.invalid"]


def test_uvloop_is_guarded(network_guard: Any) -> None:
    """uvloop, which opens sockets through libuv, is under the same rule."""
    uvloop = pytest.importorskip("uvloop")

    async def connect() -> None:
        await asyncio.get_running_loop().create_connection(asyncio.Protocol, "192.0.2.1", 80)

    with pytest.raises(RuntimeError, match="may not use the network"):
        uvloop.run(connect())
    assert network_guard.drain() == ["connection to 192.0.2.1"]


def test_loopback_is_free() -> None:
    """Loopback servers, by number and by name, work in tests."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        for host in ("127.0.0.1", "localhost"):
            with socket.create_connection((host, port), timeout=5):
                pass


def test_swallowed_refusal_still_fails(tmp_path: Path) -> None:
    """Code that catches every exception can't hide a connection that it tried to make."""
    result = _run_pytest(
        tmp_path,
        "import contextlib, socket\n"
        "def test_quiet():\n"
        "    with contextlib.suppress(Exception), socket.socket() as s:\n"
        "        s.connect(('192.0.2.1', 80))\n",
    )
    assert result.returncode == 1
    assert "tried to leave the machine" in result.stdout


SKIPPED_TEST = "import pytest\ndef test_skipped():\n    pytest.skip('no prometheus')\n"
SKIPPED_MODULE = (
    "import pytest\n"
    "def test_runs():\n    pass\n"
    "pytest.skip('no prometheus', allow_module_level=True)\n"
)


@pytest.mark.parametrize(("ci", "code"), [("true", 1), ("", 0)])
def test_skip_fails_only_in_ci(tmp_path: Path, ci: str, code: int) -> None:
    """A skipped test fails the session in CI and nowhere else."""
    result = _run_pytest(tmp_path, SKIPPED_TEST, CI=ci)
    assert result.returncode == code, result.stdout
    assert ("skips are failures in CI" in result.stdout) is bool(code)


def test_skipped_module_fails_in_ci(tmp_path: Path) -> None:
    """A test module that skips itself as a whole is no better than a skipped test."""
    result = _run_pytest(tmp_path, SKIPPED_MODULE, CI="true")
    assert result.returncode != 0
    assert "tests/test_it.py: " in result.stdout


def test_gpu_and_trace_skips_are_excused(tmp_path: Path) -> None:
    """CI accepts a skip for want of a GPU or of the trace folder beside the checkout."""
    body = (
        "import pytest\n"
        "@pytest.mark.gpu\ndef test_gpu():\n    pytest.skip('no GPU')\n"
        "def test_traces(traces_dir):\n    pass\n"
        "@pytest.mark.xfail(reason='known')\ndef test_known():\n    assert False\n"
    )
    result = _run_pytest(tmp_path, body, CI="true")
    assert result.returncode == 0, result.stdout
    assert "2 skipped, 1 xfailed" in result.stdout


def test_required_traces_fail_when_absent(tmp_path: Path) -> None:
    """With LEYLINE_REQUIRE_TRACES=1 a missing trace folder is a failure, not a skip."""
    result = _run_pytest(
        tmp_path, "def test_traces(traces_dir):\n    pass\n", LEYLINE_REQUIRE_TRACES="1"
    )
    assert result.returncode == 1
    assert "LEYLINE_REQUIRE_TRACES=1" in result.stdout
