"""A real vLLM server on a loopback port, as a process of its own."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from random import SystemRandom
from typing import Self

import httpx

_PORTS = SystemRandom()
START_S = 600.0
STOP_S = 30.0

BLOCK = 32
"""Tokens of a block; vLLM takes multiples of 32 on a CPU."""

_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # The worker runs in the engine core's process, as with one GPU: a process less to start.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "leyline",
}
_FLAGS = (
    *("--dtype", "float32", "--block-size", str(BLOCK), "--max-model-len", "4096"),
    *("--max-num-batched-tokens", "512", "--max-num-seqs", "8"),
    *("--enforce-eager", "--enable-prompt-tokens-details"),
)
API_KEY = "engine-key"
"""The key of shared servers."""
SPLICING = (
    "--kv-transfer-config",
    '{"kv_connector": "LeylineConnector", "kv_role": "kv_both"}',
)
"""Flags that switch Leyline on."""
_COMPLAINTS = re.compile(
    r"Traceback \(most recent call last\)|Failed to load plugin|Leyline's hook \w+ failed"
)


class VllmFailedError(RuntimeError):
    """The server did not come up, or died."""


class VllmServer:
    """One server; start it with :meth:`start` or as a context manager.

    Args:
        model: folder of the model.
        log: file that takes everything the server prints.
        flags: vLLM's, added to those for a small model on a CPU.
        environment: variables added to or replacing the defaults.
        python: interpreter of an environment with vLLM.
    """

    def __init__(
        self,
        model: Path,
        log: Path,
        flags: tuple[str, ...] = (),
        environment: Mapping[str, str] | None = None,
        *,
        python: str = sys.executable,
    ) -> None:
        self.model = model
        self.log = log
        self.port = free_port()
        self.base_url = f"http://127.0.0.1:{self.port}"
        self._python = python
        self._flags = flags
        self._environment = os.environ | _ENVIRONMENT | dict(environment or {})
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start the server and wait until it answers.

        Raises:
            VllmFailedError: with the end of the log, when it doesn't.
        """
        # A test run that is killed takes its servers along.
        command = ["setpriv", "--pdeathsig", "TERM", self._python]
        command += ["-P", "-m", "vllm.entrypoints.openai.api_server", "--model", str(self.model)]
        command += ["--host", "127.0.0.1", "--port", str(self.port), *_FLAGS, *self._flags]
        with self.log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
            )
        try:
            self._wait_healthy()
        except BaseException:
            self.stop()
            raise

    def terminate(self) -> None:
        """Ask the server to end."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End the server and all its processes at once, as a crash does."""
        process, self._process = self._process, None
        assert process is not None
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(STOP_S)

    def stop(self) -> None:
        """Stop the server and all its processes."""
        process, self._process = self._process, None
        if process is None:
            return
        with _gone_is_fine():
            process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(STOP_S)
        # What outlives the launcher is still in its session.
        with _gone_is_fine():
            os.killpg(process.pid, signal.SIGKILL)

    def complaints(self) -> list[str]:
        """Lines of the log that report an error or a plugin that failed."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return [line for line in lines if _COMPLAINTS.search(line)]

    def check_clean(self) -> None:
        """Assert that the server serves and that its log holds no complaint."""
        assert self._process is not None, "the server was not started"
        try:
            httpx.get(f"{self.base_url}/health", timeout=60).raise_for_status()
        except httpx.HTTPError as error:
            raise AssertionError(f"the server died: {error}\n{self._log_end()}") from error
        assert not self.complaints(), f"{self.complaints()}\n{self._log_end()}"

    def _wait_healthy(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise VllmFailedError(f"the server died at its start:\n{self._log_end()}")
            try:
                if httpx.get(f"{self.base_url}/health", timeout=10).status_code == httpx.codes.OK:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.25)
        raise VllmFailedError(f"the server did not come up:\n{self._log_end()}")

    def _log_end(self, lines: int = 60) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


@contextmanager
def _gone_is_fine() -> Iterator[None]:
    try:
        yield
    except ProcessLookupError:
        return


def free_port() -> int:
    """A loopback port that is free, below the range from which the system gives ports to others."""
    while True:
        port = _PORTS.randrange(20_000, 30_000)
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
