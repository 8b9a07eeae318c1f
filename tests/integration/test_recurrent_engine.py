"""A proxy in front of an engine with recurrent layers, from its settings to receipt and metrics.

It is the replay engine; only the capability document and the receipt's state are a hybrid's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from support.agent_history import agent_history
from typer.testing import CliRunner

from leyline_lab.stand_ins.serving import serving
from leyline_proxy.cli.main import build_app
from leyline_proxy.http.app import create_app
from leyline_proxy.settings import Settings
from leyline_proxy.upstream.embedded import create_embedded_engine

MODEL = "leyline-recall"
STATE = {
    "recurrent_layers": 3,
    "edits": "kept",
    "bytes_per_state": 4096,
    "slots": 40,
    "anchor_tokens": 16,
}
CUT = {"policy": "truncate_older_than:n=2,max_chars=20"}


class Hybrid:
    """An engine whose answers are changed as a hybrid model's would be."""

    def __init__(self, engine: ASGIApp) -> None:
        self._engine = engine
        self.payloads: list[dict[str, Any]] = []
        """Edits as the engine received them."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self._engine(scope, receive, send)
            return
        whole = bytearray()

        async def heard() -> Message:
            message = await receive()
            if scope["path"] == "/v1/chat/completions" and message.get("body"):
                hints = json.loads(message["body"])["custom_params"]["kv_hints"]
                self.payloads.append(hints["actions"][0]["payload"])
            return message

        async def changed(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = message | {"headers": [(b"content-type", b"application/json")]}
            else:
                whole.extend(message.get("body", b""))
                done = not message.get("more_body")
                message = message | {"body": _as_hybrid(bytes(whole)) if done else b""}
            await send(message)

        await self._engine(scope, heard, changed)


def _as_hybrid(body: bytes) -> bytes:
    document = json.loads(body)
    if "rotary" in document:
        document["state"] = STATE
        document["actions"] = [
            each for each in document["actions"] if not each.startswith("leyline.reuse")
        ]
    receipt = document.get("leyline_record", {}).get("receipt", {})
    if receipt.get("outcome") == "spliced":
        receipt["state"] = "kept"
    return json.dumps(document).encode()


@pytest.fixture(scope="module")
def engine() -> Iterator[tuple[Hybrid, str]]:
    """The engine and its origin."""
    hybrid = Hybrid(create_embedded_engine("replay", {"pool_tokens": 16_384}))
    with serving(hybrid) as origin:
        yield hybrid, origin


def ask(origin: str, session: str, turns: int, **options: Any) -> dict[str, Any]:
    """Send a turn; return its account."""
    messages = agent_history(turns, "look around", secret="plum=7", lines=12)
    body = {"model": MODEL, "messages": messages, "max_tokens": 1, "leyline": CUT | options}
    headers = {"x-leyline-session": session}
    answer = httpx.post(f"{origin}/v1/chat/completions", json=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    account: dict[str, Any] = answer.json()["leyline"]
    return account


def test_kept_states_are_asked_for_counted_and_never_given_unasked(
    engine: tuple[Hybrid, str],
) -> None:
    """By default edits are spliced and the receipt says that states were kept; a request for exact
    ones is prefilled by name, and continues no earlier splice."""
    hybrid, upstream = engine
    settings = Settings(upstream=upstream, reuse="live", log_level="error")
    with serving(create_app(settings)) as origin:
        ask(origin, "s", 3)
        kept = ask(origin, "s", 4)
        assert (kept["outcome"], kept["state"]) == ("spliced", "kept"), kept
        assert kept["reuse_refused"] == "recurrent_state" and kept["reuse"] is None
        assert hybrid.payloads[-1]["recurrent"] == "kept" and hybrid.payloads[-1]["directives"]
        exact = ask(origin, "s", 5, recurrent_edits="exact")
        assert (exact["outcome"], exact["reason"]) == ("reprefilled", "recurrent_state")
        assert "recurrent_edits is exact" in exact["detail"] and exact["state"] == ""
        assert exact["lineage"] is None and exact["tokens"]["spliced"] == 0
        sent = hybrid.payloads[-1]
        assert sent.get("recurrent", "exact") == "exact" and not sent.get("directives")
        ask(origin, "f", 2, recurrent_edits="exact")
        last = agent_history(2, "look around", secret="plum=7", lines=12)
        forgets = {"edits": [{"message": len(last) - 1, "mode": "forget", "replacement": "-"}]}
        gone = ask(origin, "f", 2, recurrent_edits="exact", policy="keep_all", **forgets)
        assert gone["forgot"]["result"] == "erased" and gone["forgot"]["overwritten"] > 0
        text = httpx.get(f"{origin}/metrics").text
        assert f'leyline_kept_states_total{{model="{MODEL}",tenant="default"}} 1.0' in text
        shown = CliRunner().invoke(build_app(), ["doctor", origin]).output
        words = " ".join(shown.split())
        assert "3 recurrent layers" in words and "recurrent_edits: kept." in words
        assert "Few slots for states" in words


def test_an_operator_has_the_last_word(engine: tuple[Hybrid, str]) -> None:
    """A tenant's requests can't choose what its operator has fixed."""
    _, upstream = engine
    fixed = {"recurrent_edits": "exact", "allow_request_policy": False}
    settings = Settings(
        upstream=upstream, policy=CUT["policy"], tenants={"default": fixed}, log_level="error"
    )
    with serving(create_app(settings)) as origin:
        members = {"messages": agent_history(1, "t", secret="x"), "max_tokens": 1}
        body = {"model": MODEL, "leyline": {"recurrent_edits": "kept"}, **members}
        refused = httpx.post(f"{origin}/v1/chat/completions", json=body)
        assert refused.status_code == 403
        assert refused.json()["error"]["param"] == "leyline.recurrent_edits"
