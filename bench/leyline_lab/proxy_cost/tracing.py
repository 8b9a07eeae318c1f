"""The cost of tracing to a turn: CPU time of the proxy with it off, unsampled, and exported.

Turns go through the whole application in this process, before an upstream that answers from canned
bytes; the modes take turns, so that a busy machine slows all of them. Exported spans are encoded as
for a collector, in the exporter's own thread, and then dropped.
"""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Sequence
from contextlib import AsyncExitStack
from statistics import median
from time import process_time, thread_time
from typing import Any

import httpx
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, Sampler
from starlette.types import Receive, Scope, Send

from leyline_proxy.http.app import create_app
from leyline_proxy.settings import Settings
from leyline_proxy.telemetry.logging import configure_logging
from leyline_proxy.telemetry.tracing import Tracing, stage_span
from leyline_proxy.telemetry.tracing.otel import OtelTracing
from leyline_proxy.upstream.embedded import ASGIStreamTransport, lifespan_of

from ..console import write_json
from ..harness.arguments import Arguments
from ..harness.report import show

MODEL = "canned"
ANSWER = {
    "object": "chat.completion",
    "model": MODEL,
    "choices": [
        {"index": 0, "message": {"role": "assistant", "content": "Yes."}, "finish_reason": "stop"}
    ],
    "usage": {"prompt_tokens": 900, "completion_tokens": 2, "total_tokens": 902},
}
BATCH, WARM_UP = 20, 20
LOOK_UPS = 15
"""Number of times that a turn asks for the current trace."""


class _Dropped(SpanExporter):
    """Encodes spans and drops them."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        encode_spans(spans).SerializeToString()
        return SpanExportResult.SUCCESS


def _traced(sampler: Sampler) -> Tracing:
    provider = TracerProvider(sampler=sampler, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(_Dropped()))
    return OtelTracing(provider)


async def upstream(scope: Scope, receive: Receive, send: Send) -> None:
    """Serve one model and one answer."""
    path = scope["path"]
    found: Any = {"data": [{"id": MODEL}]} if path == "/v1/models" else {}
    found = ANSWER if path == "/v1/chat/completions" else found
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 200 if found else 404, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(found).encode()})


async def measure(turns: int) -> dict[str, dict[str, float]]:
    """Return the µs of a turn by mode: of the event loop's thread, and of all threads."""
    modes = {
        "off": Tracing(),
        "on, not sampled": _traced(ALWAYS_OFF),
        "on, exported": _traced(ALWAYS_ON),
    }
    text = "What was said before, at some length. " * 20
    history = [{"role": "user", "content": text}, {"role": "assistant", "content": text}] * 4
    body = {"model": MODEL, "messages": [*history, {"role": "user", "content": "So?"}]}
    loop: dict[str, list[float]] = {name: [] for name in modes}
    total: dict[str, list[float]] = {name: [] for name in modes}
    async with AsyncExitStack() as stack:
        clients = {}
        for name, tracing in modes.items():
            app = create_app(Settings(), engine_app=upstream, tracing=tracing)
            await stack.enter_async_context(lifespan_of(app))
            transport = ASGIStreamTransport(app)
            clients[name] = await stack.enter_async_context(
                httpx.AsyncClient(transport=transport, base_url="http://localhost")
            )
        gc.collect()
        gc.freeze()  # as `leyline serve` does
        for batch in range(WARM_UP // BATCH + turns // BATCH):
            for name, client in clients.items():
                before, all_before = thread_time(), process_time()
                for _ in range(BATCH):
                    answer = await client.post("/v1/chat/completions", json=body)
                    answer.raise_for_status()
                if batch >= WARM_UP // BATCH:
                    loop[name].append((thread_time() - before) / BATCH * 1e6)
                    total[name].append((process_time() - all_before) / BATCH * 1e6)
    return {
        name: {"loop_us": median(loop[name]), "process_us": sum(total[name]) / len(total[name])}
        for name in modes
    }


def look_ups_us(repeat: int = 20_000) -> float:
    """Return the µs that the stages of one turn spend on asking for a trace that isn't there."""
    started = thread_time()
    for _ in range(repeat):
        for _ in range(LOOK_UPS):
            with stage_span("stage"):
                pass
    return (thread_time() - started) / repeat * 1e6


def main() -> None:
    """Measure, print, write."""
    parser = Arguments(__doc__)
    parser.add_argument("--turns", type=int, default=1000, help="turns in each mode")
    given = parser.parse_args()
    configure_logging("error", "json")
    found = asyncio.run(measure(given.turns))
    rows = []
    for name, figures in found.items():
        more = (figures[key] - found["off"][key] for key in ("loop_us", "process_us"))
        rows.append([name, f"{figures['loop_us']:.0f}", *(f"{value:+.0f}" for value in more)])
    show(("tracing", "µs a turn, event loop", "more than off", "all threads, more than off"), rows)
    asked = look_ups_us()
    print(f"Of a turn with tracing off, {asked:.1f} µs go into asking for a trace.")
    write_json(given.json, {**found, "look_ups_us": asked})
