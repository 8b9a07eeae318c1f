"""Traces of turns through the real proxy and the real engine."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.trace import SpanKind, format_span_id, format_trace_id
from support.tracing import Recorder, duration_s, events

from leyline_lab.stand_ins.serving import check_clean, serving
from leyline_proxy.http.app import create_app
from leyline_proxy.settings import Settings
from leyline_proxy.upstream.embedded import create_embedded_engine

CHAT = "/v1/chat/completions"
CALLERS = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
MEASURED = ("identify", "policy", "render", "diff", "decide", "account")
"""Stages that have a histogram, too."""
STAGES = {*MEASURED, "read", "upstream", "receipt"}
REPLACED = {
    "gen_ai.system",
    "gen_ai.prompt",
    "gen_ai.completion",
    "gen_ai.usage.prompt_tokens",
    "gen_ai.usage.completion_tokens",
}
CONVENTIONS = {
    value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI_")
} - REPLACED
"""Names of the semantic conventions, without those that have others in their place."""
SLACK_S = 0.003
"""Between two clocks, on a machine that is busy."""


@pytest.fixture(scope="module")
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture(scope="module")
def proxy(recorder: Recorder) -> Iterator[httpx.Client]:
    engine = create_embedded_engine("replay", {"pool_tokens": 16_384, "device": "cpu"})
    settings = Settings(policy="truncate_older_than:n=2,max_chars=60", log_level="error")
    app = create_app(settings, engine_app=engine, tracing=recorder.tracing)
    with serving(app) as origin, httpx.Client(base_url=origin, timeout=60) as client:
        yield client
    check_clean(engine)


def history(turns: int) -> list[dict[str, Any]]:
    """An agent that has called a tool on each turn."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Read all files."}]
    for number in range(turns):
        function = {"name": "read", "arguments": f'{{"file": "{number}"}}'}
        call = {"id": f"c{number}", "type": "function", "function": function}
        text = "".join(f"{number}: line {line} of the file\n" for line in range(40))
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})
    return messages


def ask(proxy: httpx.Client, recorder: Recorder, turns: int, **options: Any) -> ReadableSpan:
    """The span of a turn."""
    recorder.clear()
    headers = {"x-leyline-session": options.pop("session"), **options.pop("headers", {})}
    body = {"model": "leyline-recall", "messages": history(turns), "max_tokens": 3, **options}
    proxy.post(CHAT, json=body, headers=headers).raise_for_status()
    return recorder.request()


def stage_sums(proxy: httpx.Client) -> dict[str, float]:
    """Seconds by stage, as the histogram has them."""
    found = re.findall(
        r'^leyline_stage_seconds_sum\{.*?stage="(\w+)".*?\} (\S+)', proxy.get("/metrics").text, re.M
    )
    return {stage: float(seconds) for stage, seconds in found}


@pytest.mark.parametrize("stream", [False, True])
def test_stages_lie_in_their_request_one_after_the_other(
    proxy: httpx.Client, recorder: Recorder, stream: bool
) -> None:
    """A turn's stages are children of its span, none overlaps another, and in sum they are no
    longer than the request; planning in a worker thread doesn't lose them."""
    session = f"nested-{stream}"
    for turns in (2, 3):
        root = ask(proxy, recorder, turns, session=session, stream=stream)
    stages = recorder.stages()
    assert {span.name for span in stages} == STAGES
    assert root.name == f"POST {CHAT}"
    assert ("gen_ai.response.time_to_first_chunk" in root.attributes) == stream
    (upstream,) = recorder.stages("upstream")
    for span in (root, upstream):
        assert span.attributes["gen_ai.response.model"] == span.attributes["gen_ai.request.model"]
        assert span.attributes["gen_ai.response.finish_reasons"] in (("stop",), ("length",))
        assert span.attributes["gen_ai.response.id"]
        generative = {name for name in span.attributes if name.startswith("gen_ai.")}
        assert generative <= CONVENTIONS
    for span in stages:
        assert span.parent is not None
        assert span.parent.span_id == root.context.span_id
        assert span.context.trace_id == root.context.trace_id
    inside = sorted(stages, key=lambda span: span.start_time)
    for before, after in itertools.pairwise([*inside]):
        assert before.end_time <= after.start_time
    assert root.start_time <= inside[0].start_time
    assert inside[-1].end_time <= root.end_time
    assert duration_s(root) / 2 < sum(map(duration_s, stages)) <= duration_s(root)


def test_spans_and_histogram_measure_the_same(proxy: httpx.Client, recorder: Recorder) -> None:
    """A stage's span lasts as long as its histogram says."""
    before = stage_sums(proxy)
    ask(proxy, recorder, 2, session="same")
    after = stage_sums(proxy)
    for stage in MEASURED:
        spans = recorder.stages(stage)
        grown = after[stage] - before.get(stage, 0.0)
        assert grown > 0, stage
        assert sum(map(duration_s, spans)) == pytest.approx(grown, abs=SLACK_S), stage


def test_request_says_what_became_of_its_turn(proxy: httpx.Client, recorder: Recorder) -> None:
    """The request's span holds tenant, engine, outcome and tokens as the receipt has them; that of
    the way upstream what was asked and counted."""
    for turns in (1, 2, 3):
        root = ask(proxy, recorder, turns, session="account", temperature=0.5)
    told = root.attributes
    assert told["leyline.tenant"] == "default"
    assert told["leyline.upstream"] == "engine"
    assert told["leyline.outcome"] == told["leyline.planned"] == "spliced"
    assert told["leyline.reason"] == "spliced"
    assert told["leyline.edits"] == 1
    assert told["leyline.turn"] == 2
    assert told["leyline.tokens.spliced"] > 0
    parts = ("cached", "spliced", "prefilled")
    prompt = sum(told[f"leyline.tokens.{part}"] for part in parts)
    assert told["gen_ai.usage.input_tokens"] == prompt
    assert told["gen_ai.conversation.id"] == "account"
    assert told["http.response.status_code"] == 200
    (upstream,) = recorder.stages("upstream")
    assert upstream.kind is SpanKind.CLIENT
    asked = upstream.attributes
    assert asked["gen_ai.operation.name"] == "chat"
    assert asked["gen_ai.provider.name"] == "replay"
    assert asked["gen_ai.request.temperature"] == 0.5
    assert asked["gen_ai.usage.input_tokens"] == prompt
    assert asked["gen_ai.usage.output_tokens"] == 3
    assert 0 < asked["gen_ai.usage.cache_read.input_tokens"] <= prompt
    assert not events(root)


def test_edit_that_is_not_spliced_is_an_event(proxy: httpx.Client, recorder: Recorder) -> None:
    """An edit that ends in an ordinary prefill is noted on the request's span with its reason, and
    so is what had to be prefilled again."""
    ask(proxy, recorder, 1, session="fallback")
    recorder.clear()
    messages = history(1)
    messages[0]["content"] = "Read some of the files."
    body = {"model": "leyline-recall", "messages": messages, "max_tokens": 2}
    answer = proxy.post(CHAT, json=body, headers={"x-leyline-session": "fallback"}).json()
    assert answer["leyline"]["outcome"] == "reprefilled"
    told = dict(events(recorder.request()))
    fallback = {"reason": answer["leyline"]["reason"], "planned": "reprefilled"}
    assert told["leyline.fallback"] == fallback
    assert told["leyline.bust"]["cause"] == "undeclared"
    assert told["leyline.bust"]["tokens"] > 0


def test_callers_trace_goes_on(proxy: httpx.Client, recorder: Recorder) -> None:
    """A request that brings a trace becomes a child of the caller's span."""
    parent = f"00-{'-'.join(CALLERS)}-01"
    root = ask(proxy, recorder, 1, session="caller", headers={"traceparent": parent})
    assert format_trace_id(root.context.trace_id) == CALLERS[0]
    assert root.parent is not None
    assert format_span_id(root.parent.span_id) == CALLERS[1]
    assert {format_trace_id(span.context.trace_id) for span in recorder.stages()} == {CALLERS[0]}


def test_refused_request_says_why(proxy: httpx.Client, recorder: Recorder) -> None:
    """A request that can't be served has a span with the error's code, and nothing of its text."""
    recorder.clear()
    assert proxy.post(CHAT, json={"model": "leyline-recall", "messages": "hunter2"}).is_error
    root = recorder.request()
    assert events(root) == [("leyline.refusal", {"reason": "invalid_request"})]
    assert root.attributes["error.type"] == "invalid_request"
    assert root.attributes["http.response.status_code"] == 400
    assert "hunter2" not in root.to_json()
