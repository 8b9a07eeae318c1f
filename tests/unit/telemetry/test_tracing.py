"""Tracing: what crosses the proxy in headers, what spans may hold, what happens without it."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import format_span_id
from starlette.datastructures import Headers
from support.claims_engine import ClaimsEngine
from support.fake_engine import (
    MODEL,
    Answer,
    FakeEngine,
    chat_stream,
    proxy_before,
    tool_session,
)
from support.tracing import Recorder, events

from leyline_lab.stand_ins.serving import serving
from leyline_proxy.http.app import create_app
from leyline_proxy.settings import Settings
from leyline_proxy.telemetry.tracing import current_trace, current_trace_id

CHAT = "/v1/chat/completions"
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE}-{SPAN}-01"
ASKED = {"model": MODEL, "messages": [{"role": "user", "content": "Say hello."}]}


async def upstream_headers(
    recorder: Recorder, headers: list[tuple[str, str]], **settings: Any
) -> dict[str, str]:
    """Those that an engine is sent for a request with ``headers``."""
    engine = FakeEngine()
    async with proxy_before(engine, tracing=recorder.tracing, **settings) as http:
        (await http.post(CHAT, json=ASKED, headers=headers)).raise_for_status()
    return engine.headers[-1]


async def test_engine_is_told_of_the_span_upstream(recorder: Recorder) -> None:
    """The caller's trace continues upstream, with the proxy's span as the parent, and its state."""
    sent = await upstream_headers(
        recorder, [("traceparent", PARENT), ("tracestate", "vendor=1"), ("baggage", "a=b")]
    )
    (upstream,) = recorder.stages("upstream")
    span_id = format_span_id(upstream.context.span_id)
    assert sent["traceparent"] == f"00-{TRACE}-{span_id}-01"
    assert sent["tracestate"] == "vendor=1"
    assert sent["baggage"] == "a=b"


async def test_baggage_goes_on_as_it_came(recorder: Recorder) -> None:
    """The proxy has no part in it: properties, repeated headers and what isn't well formed stay."""
    engine = FakeEngine()
    sent = [("baggage", "a=b;secret;ttl=1"), ("baggage", "c=d"), ("baggage", "none of it")]
    async with proxy_before(engine, tracing=recorder.tracing) as http:
        (await http.post(CHAT, json=ASKED, headers=sent)).raise_for_status()
    got = [value.decode() for name, value in engine.raw_headers[-1] if name == b"baggage"]
    assert got == [value for _, value in sent]


@pytest.mark.parametrize(
    "parents",
    [
        ["00-nonsense"],
        ["00-" + "0" * 32 + "-" + SPAN + "-01"],
        [PARENT, PARENT.replace("c-", "d-")],
        [PARENT + "x" * 600],
        [],
    ],
)
async def test_parent_that_is_none_begins_a_new_trace(
    recorder: Recorder, parents: list[str]
) -> None:
    """A traceparent that is malformed, too long, contradicted or missing is no parent; the state
    that came with it goes nowhere."""
    headers = [*(("traceparent", parent) for parent in parents), ("tracestate", "vendor=1")]
    sent = await upstream_headers(recorder, headers)
    assert recorder.request().parent is None
    assert TRACE not in sent["traceparent"]
    assert "tracestate" not in sent


async def test_long_state_is_dropped_and_its_trace_goes_on(recorder: Recorder) -> None:
    """A tracestate beyond what must be passed on is left out of spans and requests."""
    state = ",".join(f"vendor{number}={'x' * 40}" for number in range(20))
    sent = await upstream_headers(recorder, [("traceparent", PARENT), ("tracestate", state)])
    assert TRACE in sent["traceparent"]
    assert "tracestate" not in sent
    assert not recorder.request().context.trace_state


async def test_without_tracing_headers_pass_as_they_are() -> None:
    """If the proxy doesn't trace, the engine gets the caller's own context."""
    engine = FakeEngine()
    async with proxy_before(engine) as http:
        sent = {"traceparent": PARENT, "tracestate": "vendor=1"}
        (await http.post(CHAT, json=ASKED, headers=sent)).raise_for_status()
    assert sent.items() <= engine.headers[-1].items()


async def test_unsampled_trace_goes_on_unsampled() -> None:
    """A trace that the sampler leaves out has no spans, and the engine gets that mark."""
    recorder = Recorder(sampler=ALWAYS_OFF)
    sent = await upstream_headers(recorder, [("traceparent", PARENT)])
    assert sent["traceparent"].startswith(f"00-{TRACE}-")
    assert sent["traceparent"].endswith("-00")
    assert not recorder.spans()


def test_trace_id_is_that_of_the_request(recorder: Recorder) -> None:
    """Code that serves a request can ask for its trace's id, and no other code gets one."""
    assert current_trace_id() is None
    headers = Headers({"traceparent": PARENT})
    with recorder.tracing.request("POST", CHAT, headers):
        assert current_trace_id() == TRACE
    assert current_trace_id() is None
    unsampled = Recorder(sampler=ALWAYS_OFF)
    with unsampled.tracing.request("POST", CHAT, headers) as trace:
        assert current_trace_id() is None  # an exemplar would lead nowhere
        assert trace.trace_id == TRACE  # but the logs of others may have it


def test_failover_is_an_event(recorder: Recorder) -> None:
    """A request that moves to another engine has a span of each attempt, and says why."""
    engines = {name: FakeEngine() for name in ("a", "b")}
    with ExitStack() as stack:
        origins = {name: stack.enter_context(serving(each)) for name, each in engines.items()}
        app = create_app(Settings(upstreams=origins), tracing=recorder.tracing)
        origin = stack.enter_context(serving(app))
        first = httpx.post(f"{origin}{CHAT}", json=ASKED, headers={"x-leyline-session": "s"})
        first.raise_for_status()
        (upstream,) = recorder.stages("upstream")
        failing = str(upstream.attributes["leyline.upstream"])
        recorder.clear()
        engines[failing].answers.append(Answer([b"{}"], status=503))
        second = httpx.post(f"{origin}{CHAT}", json=ASKED, headers={"x-leyline-session": "s"})
        second.raise_for_status()
    root = recorder.request()
    told = [("leyline.failover", {"upstream": failing, "reason": "upstream_error"})]
    assert events(root) == told
    attempts = recorder.stages("upstream")
    assert [span.attributes["http.response.status_code"] for span in attempts] == [503, 200]
    assert root.attributes["leyline.upstream"] != failing
    assert root.attributes["http.response.status_code"] == 200


async def test_requests_of_other_routes_are_traced(recorder: Recorder) -> None:
    """A bare completion is a request with a way upstream, too."""
    engine = FakeEngine()
    async with proxy_before(engine, tracing=recorder.tracing) as http:
        await http.post("/v1/completions", json={"model": MODEL, "prompt": "hunter2"})
    assert recorder.request().name == "POST /v1/completions"
    assert len(recorder.stages("upstream")) == 1
    assert not any("hunter2" in span.to_json() for span in recorder.spans())


async def test_content_needs_its_switch() -> None:
    """Messages are in spans only where that is asked for, as they go upstream, and cut short."""
    history = [*tool_session(3), {"role": "user", "content": "Do you know hunter2?"}]
    for chars in (0, 400):
        recorder = Recorder(content_chars=chars)
        engine = FakeEngine()
        policy = "redact:pattern='hunter2',replacement='[gone]'"
        async with proxy_before(engine, tracing=recorder.tracing, policy=policy) as http:
            body = {"model": MODEL, "messages": history}
            (await http.post(CHAT, json=body)).raise_for_status()
        exported = encode_spans(recorder.spans()).SerializeToString()
        assert b"hunter2" not in exported
        assert (b"Do you know [gone]?" in exported) == bool(chars)
        assert b"List the folders." not in exported  # the oldest message


async def test_large_numbers_are_left_out(recorder: Recorder) -> None:
    """A parameter beyond 64 bits isn't exported; it would cost the batch."""
    engine = FakeEngine()
    async with proxy_before(engine, tracing=recorder.tracing) as http:
        await http.post(CHAT, json={**ASKED, "seed": 10**30, "top_k": 7, "top_p": "hunter2"})
    (upstream,) = recorder.stages("upstream")
    assert "gen_ai.request.seed" not in upstream.attributes
    assert "gen_ai.request.top_p" not in upstream.attributes
    assert upstream.attributes["gen_ai.request.top_k"] == 7
    encode_spans(recorder.spans())


async def test_work_behind_a_request_adds_nothing_to_it(recorder: Recorder) -> None:
    """Work after the response has no stages of a request that has ended."""
    with recorder.tracing.request("POST", CHAT, Headers({})):
        trace = current_trace()
    with trace.stage("account"):
        trace.event("leyline.failover", {})
    (span,) = recorder.spans()
    assert not span.events


async def test_refusal_for_the_sake_of_claims_is_an_event(recorder: Recorder) -> None:
    """A request that doesn't fit beside a hard claim says so on its span, once."""
    engine = ClaimsEngine(pool=400, share=1.0, engine_share=1.0)
    async with proxy_before(engine, tracing=recorder.tracing, claims_interval_s=60) as http:
        headers = {"x-leyline-session": "s"}
        long = {"model": MODEL, "messages": [{"role": "user", "content": "x" * 200}]}
        (await http.post(CHAT, json=long, headers=headers)).raise_for_status()
        claim = {"session": "s", "id": "plan", "kind": "hard", "predicate": {}}
        (await http.post("/v1/leyline/claims", json=claim)).raise_for_status()
        recorder.clear()
        long["messages"] = [{"role": "user", "content": "y" * 300}]
        assert (await http.post(CHAT, json=long, headers=headers)).status_code == 503
    root = recorder.request()
    assert events(root) == [("leyline.refusal", {"reason": "refused_by_claim"})]
    assert root.attributes["http.response.status_code"] == 503


async def test_requests_at_once_keep_their_traces_apart(recorder: Recorder) -> None:
    """Each stage of requests that run at the same time, planned in worker threads, is in the trace
    of its own request."""
    engine = FakeEngine()
    async with proxy_before(engine, tracing=recorder.tracing, policy="keep_all") as http:

        async def ask(number: int) -> None:
            headers = {"traceparent": f"00-{number:032x}-{SPAN}-01"}
            (await http.post(CHAT, json=ASKED, headers=headers)).raise_for_status()

        await asyncio.gather(*(ask(number) for number in range(1, 13)))
    names: dict[int, list[str]] = {}
    for span in recorder.spans():
        names.setdefault(span.context.trace_id, []).append(span.name)
    assert set(names) == set(range(1, 13))
    assert len({tuple(sorted(found)) for found in names.values()}) == 1
    assert {"policy", "decide", "upstream", "account"} <= set(names[1])


async def test_client_that_leaves_ends_its_trace(recorder: Recorder) -> None:
    """A client that goes away in the middle of a stream leaves no span open, and its request's says
    what happened."""
    engine = FakeEngine()
    engine.answers.append(chat_stream("Hel", hangs=True))
    async with (
        proxy_before(engine, tracing=recorder.tracing) as http,
        http.stream("POST", CHAT, json={**ASKED, "stream": True}) as answer,
    ):
        await anext(answer.aiter_bytes())
    root = recorder.request()
    assert root.attributes["error.type"] == "disconnected"
    (upstream,) = recorder.stages("upstream")
    assert upstream.end_time <= root.end_time
    assert not current_trace().recording
