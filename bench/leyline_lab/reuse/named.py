"""Reuse by name: how much of what two agents read is found by the search, by names, and by both.

One agent reads texts with a tool. Another of the same tenant, with a prompt of its own, reads them
in another order, with thoughts of its own between them, and under other ids of calls. The embedded
engine serves both through the proxy, with and without its search; for the search alone, the names
are taken out of the requests on their way.
"""

from __future__ import annotations

import asyncio
import json
import random
from array import array
from collections.abc import Iterator
from statistics import median
from time import process_time
from typing import Any

import httpx
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from leyline_engine.contract import REUSE_ACTION, token_digest
from leyline_proxy.http.app import create_app
from leyline_proxy.model.prepared import Prepared
from leyline_proxy.model.rendered import MessageSpan, Rendered
from leyline_proxy.model.session import RetainedTurn, Session
from leyline_proxy.model.spans import SpanNames
from leyline_proxy.plan.named import name_copies
from leyline_proxy.sessions.contents import ContentIndex
from leyline_proxy.settings import Settings
from leyline_proxy.telemetry.logging import configure_logging
from leyline_proxy.upstream.embedded import ASGIStreamTransport, create_embedded_engine, lifespan_of

from ..console import write_json
from ..engines.stack import CHAT_PATH as CHAT
from ..harness.arguments import Arguments, numbers
from ..harness.report import show
from ..traces.texts import demo_material

LENGTHS = (60, 120, 240, 480, 2000)
"""Characters of a text."""
ARMS = {"search": ("winnow", False), "names": ("off", True), "both": ("winnow", True)}
"""The engine's matcher, and True if names are sent."""
PER_MESSAGE = 340
"""Tokens of a message, for the cost."""


class NoNames:
    """An engine that gets no names."""

    def __init__(self, engine: ASGIApp) -> None:
        self._engine = engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http" or scope["path"] != CHAT:
            await self._engine(scope, receive, send)
            return
        document = json.loads(await Request(scope, receive).body())
        for action in document["custom_params"]["kv_hints"]["actions"]:
            if action["action_type"] == REUSE_ACTION:
                action["payload"] |= {"sources": [], "copies": []}
        parts = iter([json.dumps(document).encode()])

        async def changed() -> Any:
            body = next(parts, None)
            if body is None:
                return await receive()
            return {"type": "http.request", "body": body, "more_body": False}

        await self._engine(scope, changed, send)


def pieces(length: int, count: int, seed: int) -> list[str]:
    """Return texts of the demo's session."""
    text, rng = demo_material().text, random.Random(seed)
    starts = rng.sample(range(0, len(text) - length, length), count)
    return [text[start : start + length] for start in starts]


def agent(name: str, texts: list[str], thoughts: list[str]) -> list[dict[str, Any]]:
    """Return an agent's list after it has read texts."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": f"You are {name}. You read settings and answer questions."},
        {"role": "user", "content": f"{name}, look at the project and report."},
    ]
    for number, (text, thought) in enumerate(zip(texts, thoughts, strict=True)):
        identifier = f"call-{name}-{number}"
        function = {"name": "read", "arguments": "{}"}
        call = {"id": identifier, "type": "function", "function": function}
        messages.append({"role": "assistant", "content": thought, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": identifier, "content": text})
    return messages


async def reused(arm: str, length: int, count: int) -> dict[str, float]:
    """Return the tokens of the second agent's prompt, of its texts, and of those reused."""
    matcher, names = ARMS[arm]
    options = {"pool_tokens": 131_072, "device": "cpu", "matcher": matcher}
    engine = create_embedded_engine("replay", options)
    settings = Settings(log_level="error", reuse="live")
    app = create_app(settings, engine_app=engine if names else NoNames(engine))
    texts, other = pieces(length, count, 1), random.Random(2)
    transport = ASGIStreamTransport(app)
    async with (
        lifespan_of(app),
        httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=300) as http,
    ):
        for number, name in enumerate(("Ada", "Grace")):
            shown = agent(name, texts, pieces(90, count, 3 + number))
            body = {"model": "leyline-recall", "messages": shown, "max_tokens": 1}
            answer = await http.post(CHAT, json=body, headers={"x-leyline-session": name})
            answer.raise_for_status()
            texts = other.sample(texts, count)
        (tenant,) = app.state.services.tenants.names
        session = await app.state.services.store.get(tenant, "Grace")
    (turn,) = session.turns
    spans = [span for span in turn.rendered.spans if shown[span.message]["role"] == "tool"]
    tokens = answer.json()["leyline"]["tokens"]
    read = sum(span.end - span.start for span in spans)
    return {"prompt": tokens["prompt"], "read": read, "reused": tokens["reused"]}


def rows(count: int) -> Iterator[dict[str, Any]]:
    """Yield the result of each length."""
    for length in LENGTHS:
        by_arm = {arm: asyncio.run(reused(arm, length, count)) for arm in ARMS}
        first = by_arm["both"]
        yield {
            "tokens": round(first["read"] / count),
            "prompt": first["prompt"],
            "read": first["read"],
            **{arm: found["reused"] for arm, found in by_arm.items()},
        }


def cost_ms(size: int, repeat: int) -> tuple[float, float]:
    """Return the CPU time to name copies for a prompt, and to learn the turn, in milliseconds."""
    rng = random.Random(size)
    tokens = array("q", (rng.randrange(100_000) for _ in range(size)))
    starts = range(0, size - PER_MESSAGE, PER_MESSAGE)
    spans = tuple(MessageSpan(at, s, s + PER_MESSAGE - 8) for at, s in enumerate(starts))
    prompt = Rendered(tokens, spans)
    index = ContentIndex()
    index.note("t")
    learn, name = [], []
    for number in range(repeat):
        session = Session(f"s{number}", "t", "", (_turn(prompt),), (), 1, 0.0, created=0.0)
        began = process_time()
        index.put(session)
        learn.append(process_time() - began)
        began = process_time()
        found = name_copies(
            prompt,
            ((0, 0),),
            lambda span: index.places("t", "run", prompt, span),
            session="new",
            sink=32,
        )
        name.append(process_time() - began)
        if len(found.copies) != 1:
            raise RuntimeError("the prompt is one copy of the latest session's")
    return 1e3 * median(name), 1e3 * median(learn)


def _turn(prompt: Rendered) -> RetainedTurn:
    digest = token_digest(prompt.tokens)
    names = SpanNames()
    return RetainedTurn("t0", 0, Prepared((), ()), prompt, (), (), None, digest, "run", names=names)


def main() -> None:
    """Measure what is reused, then the cost of names, print, write."""
    parser = Arguments(__doc__)
    parser.add_argument("--texts", type=int, default=12, help="texts that both agents read")
    parser.add_argument("--sizes", type=numbers, default="10000,50000,100000", help="in tokens")
    given = parser.parse_args()
    configure_logging("error", "console")
    found = list(rows(given.texts))
    reused_rows = [
        (
            *(f"{row[name]:,}" for name in ("tokens", "prompt", "read")),
            *(f"{row[arm]:,} ({row[arm] / row['prompt']:.1%})" for arm in ARMS),
        )
        for row in found
    ]
    title = "tokens of the second agent's prompt"
    show(("a text", "prompt", "texts", *ARMS), reused_rows, title=title, words=0)
    costs = {size: cost_ms(size, 30) for size in given.sizes}
    cost_rows = [(f"{n:,}", *(f"{each:.2f} ms" for each in cost)) for n, cost in costs.items()]
    show(("prompt", "to name", "to learn"), cost_rows, title="CPU of the proxy", words=0)
    write_json(given.json, {"texts": given.texts, "lengths": found, "cost_ms": costs})
