"""A real SGLang server that splices, and proxies before it.

SGLang lives in an environment of its own (``make sglang-setup``); without it these tests are
skipped.
"""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from support.sglang_stack import (
    HINTS_SECRET,
    PYTHON,
    Proxies,
    SglangServer,
    StartProxy,
    sglang_server,
)


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangServer]:
    """SGLang with the plugin, an API key and a secret for envelopes; its log must stay clean."""
    if not PYTHON.is_file():
        pytest.skip("SGLang isn't installed here: make sglang-setup")
    log = tmp_path_factory.mktemp("sglang") / "log"
    flags = ("--radix-cache-backend", "leyline")
    with sglang_server(log, *flags, LEYLINE_HINTS_SECRET=HINTS_SECRET) as server:
        yield server
        if server.running:
            server.check_clean()


@pytest.fixture
def start_proxy() -> Iterator[StartProxy]:
    """Starts a proxy before a server, by its base URL; stopped when the test ends."""
    with Proxies() as proxies:
        yield proxies.start


@pytest.fixture(scope="module")
def origin(engine: SglangServer) -> Iterator[str]:
    """A proxy that splices before the engine."""
    with Proxies() as proxies:
        address = proxies.start(engine.base_url)
        upstream = httpx.get(f"{address}/readyz").json()["upstreams"][0]
        assert upstream["splices"], upstream
        yield address
