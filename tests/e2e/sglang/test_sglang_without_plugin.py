"""SGLang comes back without the plugin: an ordinary restart for clients, and a plain back end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.sglang_stack import MODEL, Proxies, SglangServer, sglang_server

# SGLang is started again for these alone; plain back ends are tested at each commit elsewhere.
pytestmark = pytest.mark.nightly

POLICY = "truncate_older_than:n=2,max_chars=80"
LISTING = "".join(f"{number:03d} build/module_{number}\n" for number in range(40))
NOTICED_S = 30.0


def messages(turns: int) -> list[dict[str, Any]]:
    """An agent's history with a long result per turn."""
    history: list[dict[str, Any]] = [{"role": "user", "content": "List the folders."}]
    for turn in range(turns):
        function = {"name": "ls", "arguments": f'{{"path": "{turn}"}}'}
        call = {"id": f"c{turn}", "type": "function", "function": function}
        history += [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"c{turn}", "content": f"{turn}\n{LISTING}"},
        ]
    return history


def turn(origin: str, turns: int, **members: Any) -> httpx.Response:
    """One turn of the session."""
    body = {"model": MODEL, "messages": messages(turns), "max_tokens": 2, **members}
    headers = {"x-leyline-session": "restarted"}
    return httpx.post(f"{origin}/v1/chat/completions", json=body, headers=headers, timeout=120)


def upstream(origin: str) -> dict[str, Any]:
    """The engine's status in ``/readyz``."""
    found: dict[str, Any] = httpx.get(f"{origin}/readyz", timeout=30).json()["upstreams"][0]
    return found


@pytest.fixture(scope="module")
def restarted(
    engine: SglangServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A proxy whose engine was stopped and started again unpatched, and the accounts before that.

    No test of another module may use the engine after this one.
    """
    with Proxies() as proxies:
        origin = proxies.start(engine.base_url, policy=POLICY, edit_timing="now")
        before = [turn(origin, turns).json()["leyline"] for turns in (1, 2, 3)]
        engine.check_clean()
        engine.stop()
        assert turn(origin, 4).status_code == httpx.codes.BAD_GATEWAY
        log = tmp_path_factory.mktemp("sglang-plain") / "log"
        unpatched = {"SGLANG_PLUGINS": "leyline_cpu"}
        flags = ("--radix-cache-backend=",)
        with sglang_server(log, *flags, port=engine.port, **unpatched) as server:
            yield origin, before
            server.check_clean()


def test_the_session_goes_on_and_says_that_nothing_is_spliced(
    restarted: tuple[str, list[dict[str, Any]]],
) -> None:
    """The policy's edits still reach the engine; the account says why they weren't spliced."""
    origin, before = restarted
    assert before[-1]["reason"] == "spliced"
    after = [turn(origin, turns) for turns in (4, 5)]
    assert [answer.status_code for answer in after] == [200, 200]
    accounts = [answer.json()["leyline"] for answer in after]
    for account in accounts:
        assert (account["outcome"], account["reason"]) == ("reprefilled", "unsupported_runtime")
        assert account["tokens"]["spliced"] == 0
        assert "capability document" in account["detail"]
    assert accounts[1]["tokens"]["prefix"] > 0


def test_the_plugin_is_missed(restarted: tuple[str, list[dict[str, Any]]]) -> None:
    """``/readyz`` and metrics say that the back end is plain, within seconds."""
    origin, _ = restarted
    deadline = time.monotonic() + NOTICED_S
    while not upstream(origin)["up"] and time.monotonic() < deadline:
        time.sleep(0.1)
    found = upstream(origin)
    assert (found["up"], found["engine"], found["splices"]) == (True, "plain", False)
    assert "404" in found["obstacle"]
    metrics = httpx.get(f"{origin}/metrics").text
    assert (
        f'leyline_engine_splices{{engine="plain",model="{MODEL}",upstream="engine"}} 0.0' in metrics
    )


def test_streams_of_a_plain_back_end_carry_an_account(
    restarted: tuple[str, list[dict[str, Any]]],
) -> None:
    """The finish chunk has the member, and the stream ends as SGLang ends it."""
    origin, _ = restarted
    answer = turn(origin, 1, stream=True)
    assert answer.text.count('"leyline":') == 1
    assert answer.text.rstrip().endswith("data: [DONE]")
