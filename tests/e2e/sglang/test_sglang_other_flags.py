"""SGLang comes back with flags under which nothing is spliced: the session goes on."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from support.sglang_stack import HINTS_SECRET, PYTHON, Proxies, SglangServer, sglang_server
from test_sglang_without_plugin import NOTICED_S, POLICY, turn, upstream

# SGLang is started twice for this alone.
pytestmark = pytest.mark.nightly

PLUGIN = "--radix-cache-backend=leyline"
REFUSED = ("--page-size=8", "--enable-streaming-session")
WHY = "pages of 8 tokens; streaming sessions"
FIX = "start with --page-size 1; drop --enable-streaming-session and --enable-session-radix-cache"


def accounts(origin: str, *turns: int) -> list[dict[str, Any]]:
    """The accounts of turns that must all be served."""
    answers = [turn(origin, number) for number in turns]
    assert [answer.status_code for answer in answers] == [200] * len(turns)
    return [answer.json()["leyline"] for answer in answers]


def started(log: Path, *flags: str, port: int | None = None) -> SglangServer:
    """A server with the plugin, not started yet."""
    return sglang_server(log, PLUGIN, *flags, port=port, LEYLINE_HINTS_SECRET=HINTS_SECRET)


def test_a_session_outlives_flags_that_refuse_splices(tmp_path: Path) -> None:
    """Turns are served and prefilled; ``/readyz`` names each refusal and the flag that lifts it."""
    if not PYTHON.is_file():
        pytest.skip("SGLang isn't installed here: make sglang-setup")
    with Proxies() as proxies:
        with started(tmp_path / "first") as server:
            origin = proxies.start(server.base_url, policy=POLICY, edit_timing="now")
            before = accounts(origin, 1, 2, 3)
            server.check_clean()
        with started(tmp_path / "second", *REFUSED, port=server.port) as server:
            deadline = time.monotonic() + NOTICED_S
            while not upstream(origin)["up"] and time.monotonic() < deadline:
                time.sleep(0.1)
            after = accounts(origin, 4, 5)
            found = upstream(origin)
            server.check_clean()
    assert before[-1]["reason"] == "spliced"
    # The new run has none of the old one's turns, which would be named first.
    assert [account["reason"] for account in after] == ["missing_source", "unsupported_runtime"]
    for account in after:
        assert account["outcome"] == "reprefilled"
        assert account["tokens"]["spliced"] == 0
        assert WHY in account["detail"]
    assert (found["engine"], found["splices"]) == ("sglang", False)
    assert (found["obstacle"], found["fix"]) == (WHY, FIX)
