"""A real SGLang server on a loopback port, as a process of its own."""

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
from typing import Any, Self

import httpx

_PORTS = SystemRandom()
START_S = 240.0
STOP_S = 30.0

# SGLang's own checks at their strictest: a slot that is lost or freed twice ends the scheduler.
_STRICT = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
    "SGLANG_ENABLE_TREE_CACHE_SANITY_CHECK": "1",
    "SGLANG_INVARIANT_CHECK": "2",
}
_ENVIRONMENT = _STRICT | {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    # What a test expects to be copied doesn't depend on the price of a forward.
    "LEYLINE_STAGE_COST_TOKENS": "0",
    "TOKENIZERS_PARALLELISM": "false",
}
_COMPLAINTS = re.compile(
    r"Traceback \(most recent call last\)"
    r"|leak detected|double free|use-after-free"
    r"|Failed to (?:load plugin|execute general plugin|apply hooks|activate platform)"
    r"|hit an exception",
    re.IGNORECASE,
)


class ServerFailedError(RuntimeError):
    """The server did not come up, or died."""


class SglangServer:
    """One server; start it with :meth:`start` or as a context manager.

    Args:
        model: folder of the model.
        log: file that takes everything the server prints.
        flags: SGLang's, added to the defaults of the CPU launcher.
        environment: variables added to or replacing the defaults.
        python: interpreter of an environment with SGLang.
        port: to listen on; by default a free one.
        module: what is run; by default the launcher for CPUs, which adds flags of its own.
    """

    def __init__(
        self,
        model: Path,
        log: Path,
        flags: tuple[str, ...] = (),
        environment: Mapping[str, str] | None = None,
        *,
        python: str = sys.executable,
        port: int | None = None,
        module: str = "leyline_lab.sglang_cpu.launch",
    ) -> None:
        self.model = model
        self.log = log
        self.port = port or free_port()
        self.base_url = f"http://127.0.0.1:{self.port}"
        self._python = python
        self._module = module
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
            ServerFailedError: with the end of the log, when it doesn't.
        """
        # A test run that is killed takes its servers along.
        command = ["setpriv", "--pdeathsig", "TERM"]
        command += [self._python, "-P", "-m", self._module]
        command += ["--model-path", str(self.model), "--host", "127.0.0.1"]
        command += ["--port", str(self.port), *self._flags]
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

    @property
    def running(self) -> bool:
        """True if it was started, and not stopped since."""
        return self._process is not None

    def terminate(self) -> None:
        """Ask the server to end when it has answered what it has begun."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)

    def ended(self, within_s: float) -> bool:
        """Return True if the server ends by itself in this time."""
        assert self._process is not None
        try:
            self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            return False
        return True

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

    def generate(self, prompt: list[int], max_new_tokens: int, **body: Any) -> dict[str, Any]:
        """Greedy tokens for a prompt of token ids, past any end-of-sequence token.

        Returns:
            SGLang's answer: ``output_ids`` and ``meta_info`` among others.
        """
        sampling = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": sampling} | body
        answer = httpx.post(f"{self.base_url}/generate", json=body, timeout=120)
        answer.raise_for_status()
        decoded: dict[str, Any] = answer.json()
        return decoded

    def flush_cache(self) -> None:
        """Forget every cached prefix; the server must be idle."""
        httpx.post(f"{self.base_url}/flush_cache", timeout=60).raise_for_status()

    def complaints(self) -> list[str]:
        """Lines of the log that report an error, a leak or a plugin that failed."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return [line for line in lines if _COMPLAINTS.search(line)]

    def check_clean(self) -> None:
        """Assert that the server serves and that its log holds no complaint.

        The health check runs a token through the scheduler, which counts its slots before and
        after.
        """
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
                raise ServerFailedError(f"the server died at its start:\n{self._log_end()}")
            try:
                if httpx.get(f"{self.base_url}/health", timeout=10).status_code == httpx.codes.OK:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.25)
        raise ServerFailedError(f"the server did not come up:\n{self._log_end()}")

    def _log_end(self, lines: int = 60) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


@contextmanager
def _gone_is_fine() -> Iterator[None]:
    try:
        yield
    except ProcessLookupError:
        return


def free_port() -> int:
    """A loopback port that is free, and that the system gives to no one unasked.

    A server takes it some 20 s later. Until then the system may give any port of its own range to
    others, so it is drawn from below that range.
    """
    while True:
        port = _PORTS.randrange(20_000, 30_000)
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
