"""A real ``leyline serve`` on a free port, with the settings of an arm."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from ..engines.serve import Serving, serving
from ..errors import EndpointError
from .accounts import Account, account_of
from .benchmarks import Endpoint

_START_S = 120.0
_ASK_S = 10.0


def serve_flags(upstream: str) -> tuple[str, ...]:
    """Return the flags of ``leyline serve`` that all arms share."""
    return ("--host", "127.0.0.1", "--upstream", upstream)


class Proxy:
    """A running proxy."""

    def __init__(self, served: Serving, key: str) -> None:
        self._served = served
        self._client = httpx.Client(
            base_url=served.origin,
            headers={"Authorization": f"Bearer {key}"},
            timeout=_ASK_S,
            trust_env=False,
        )
        self.endpoint = Endpoint(f"{served.origin}/v1", key)

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
        return self._served.running()


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
    deadline = time.monotonic() + _START_S
    with serving(serve_flags(upstream), environment, log, deadline) as served:
        proxy = Proxy(served, key)
        try:
            while proxy.engine() is None:
                served.check(deadline)
                time.sleep(0.1)
            yield proxy
        finally:
            proxy.close()
