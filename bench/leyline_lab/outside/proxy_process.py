"""A real ``leyline serve`` on a free port, with the settings of an arm."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from ..errors import EndpointError
from .accounts import Account, account_of
from .benchmarks import Endpoint
from .processes import last_line, started

_START_S = 120.0
_ASK_S = 10.0
_ADDRESS = re.compile(r"^\s*base_url\s+(http://\S+)/v1\s*$", re.MULTILINE)
_COMMAND = "from leyline_proxy.cli import main; main()"


def serve_arguments(upstream: str) -> tuple[str, ...]:
    """Return the flags of ``leyline`` that all arms share."""
    return ("serve", "--host", "127.0.0.1", "--port", "0", "--upstream", upstream)


class Proxy:
    """A running proxy."""

    def __init__(self, process: subprocess.Popen[bytes], origin: str, key: str) -> None:
        self._process = process
        self._client = httpx.Client(
            base_url=origin,
            headers={"Authorization": f"Bearer {key}"},
            timeout=_ASK_S,
            trust_env=False,
        )
        self.endpoint = Endpoint(f"{origin}/v1", key)

    def engine(self) -> dict[str, Any] | None:
        """Return what the proxy reports of its engine, or None while it isn't ready."""
        with suppress(httpx.HTTPError, ValueError, LookupError):
            answer = self._client.get("/readyz")
            if answer.status_code == httpx.codes.OK:
                found: dict[str, Any] = answer.json()["upstreams"][0]
                return found
        return None

    def account(self) -> Account:
        """Return the counts since the proxy's start.

        Raises:
            EndpointError: the proxy doesn't answer.
        """
        try:
            answer = self._client.get("/metrics")
            answer.raise_for_status()
        except httpx.HTTPError as error:
            raise EndpointError("the proxy of the arm stopped answering") from error
        return account_of(answer.text)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def running(self) -> bool:
        """Return True while the process is there."""
        return self._process.poll() is None


@contextmanager
def running_proxy(
    upstream: str, environment: Mapping[str, str], key: str, log: Path
) -> Iterator[Proxy]:
    """Run a proxy that is ready, and stop it at the end.

    Args:
        environment: of the process; the only source of settings but for the flags.
        key: of the tenant that the environment configures.
        log: file that all its output is appended to.

    Raises:
        EndpointError: it doesn't become ready.
        OSError: the log can't be written.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    begins = log.stat().st_size if log.exists() else 0
    command = (sys.executable, "-P", "-c", _COMMAND, *serve_arguments(upstream))
    with started(command, Path.cwd(), environment, log) as process:
        deadline = time.monotonic() + _START_S
        origin = _origin(process, log, begins, deadline)
        proxy = Proxy(process, origin, key)
        try:
            while proxy.engine() is None:
                _check(process, log, deadline)
                time.sleep(0.1)
            yield proxy
        finally:
            proxy.close()


def _origin(process: subprocess.Popen[bytes], log: Path, begins: int, deadline: float) -> str:
    while True:
        with log.open("rb") as file:
            file.seek(begins)
            found = _ADDRESS.search(file.read(1024 * 1024).decode(errors="replace"))
        if found is not None:
            return found[1]
        _check(process, log, deadline)
        time.sleep(0.05)


def _check(process: subprocess.Popen[bytes], log: Path, deadline: float) -> None:
    if process.poll() is not None:
        raise EndpointError(f"the proxy of the arm doesn't start: {last_line(log)}")
    if time.monotonic() > deadline:
        raise EndpointError(f"the proxy of the arm isn't ready after {_START_S:.0f} s; see {log}")
