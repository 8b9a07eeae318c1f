"""A real SGLang server on a loopback port, as a process in its own environment."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, distribution
from importlib.resources import files
from pathlib import Path
from random import SystemRandom

import httpx

PYTHON_VARIABLE = "LEYLINE_SGLANG_PYTHON"
"""Environment variable: interpreter of the environment with SGLang."""
SHIPPED_NAME = "leyline-recall"
THINKING_NAME = "leyline-recall-thinking"

_TRAINED = {
    name: Path(str(files("leyline_engine"))) / "replay" / "models" / "trained" / folder
    for name, folder in (
        (SHIPPED_NAME, "plain"),
        ("leyline-recall-notes", "notes"),
        (THINKING_NAME, "thinking"),
    )
}
CPU_LAUNCHER = "leyline_engine.sglang.cpu.launch"
_CHECKOUT_PYTHON = Path(".venv-sglang/bin/python")
_START_S = 600.0
_STOP_S = 30.0
_LOG_LINES = 25


class SglangProcessError(RuntimeError):
    """A server that can't be started, or died; the message gives the fix or the end of its log."""


def sglang_python(flag: str = "--url") -> str:
    """Return an interpreter with SGLang: this one, the environment's variable, or the checkout's.

    Args:
        flag: the command's flag for a running server.

    Raises:
        SglangProcessError: there is none.
    """
    if named := os.environ.get(PYTHON_VARIABLE):
        return named
    with suppress(PackageNotFoundError):
        distribution("sglang")
        return sys.executable
    if _CHECKOUT_PYTHON.exists():
        return str(_CHECKOUT_PYTHON.absolute())
    raise SglangProcessError(
        "SGLang isn't installed here. In a checkout: make sglang-setup. Elsewhere, name the Python "
        f"that has it in {PYTHON_VARIABLE}, or give the address of a server that runs: {flag}"
    )


def shipped_model() -> Path:
    """Return the folder of the trained model that ships with the package."""
    return _TRAINED[SHIPPED_NAME]


def shipped_folder(name: str) -> Path | None:
    """Return the folder of a trained model that ships with the package; None for other names."""
    return _TRAINED.get(name)


@contextmanager
def sglang_server(
    model: Path | str | None,
    log: Path,
    flags: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    *,
    launcher: str = CPU_LAUNCHER,
) -> Iterator[SglangProcess]:
    """Run a healthy server, and stop it at the end.

    Args:
        model: folder or hub id; by default the shipped one.
        log: file for all its output.
        flags: SGLang's, over the launcher's defaults.
        environment: variables added to this process's.
        launcher: module that starts SGLang; by default Leyline's for this machine's CPU.

    Raises:
        SglangProcessError: it doesn't come up.
    """
    named = ["--model-path", str(model or shipped_model())]
    if model is None:
        named += ["--served-model-name", SHIPPED_NAME]
    port = _free_port()
    command = [sglang_python(), "-P", "-m", launcher, *named, "--host", "127.0.0.1"]
    command += ["--port", str(port), *flags]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(  # noqa: S603 - the user's own interpreter and flags
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"HF_HUB_OFFLINE": "1"} | dict(environment or {}),
            start_new_session=True,
        )
    server = SglangProcess(process, f"http://127.0.0.1:{port}", log)
    try:
        server.wait_healthy()
        yield server
    finally:
        server.stop()


class SglangProcess:
    """A started server; see :func:`sglang_server`."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, log: Path) -> None:
        self._process = process
        self.url = url
        self._log = log

    @property
    def pid(self) -> int:
        """Process id of the launcher, parent of the scheduler."""
        return self._process.pid

    def wait_healthy(self) -> None:
        """Wait until the server answers.

        Raises:
            SglangProcessError: it died, or doesn't answer within ten minutes.
        """
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise SglangProcessError(f"SGLang died at its start:\n{self._log_end()}")
            with suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/health", timeout=10).status_code == httpx.codes.OK:
                    return
            time.sleep(0.25)
        raise SglangProcessError(f"SGLang did not come up:\n{self._log_end()}")

    def stop(self) -> None:
        """End the server with all its processes."""
        self._process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_S)
        # Processes that outlive the launcher are still in its session.
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(_STOP_S)

    def _log_end(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(lines[-_LOG_LINES:])


def _free_port() -> int:
    """Return a free port below the ephemeral range: the server binds it only some 20 s later."""
    while True:
        port = SystemRandom().randrange(20_000, 30_000)
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
