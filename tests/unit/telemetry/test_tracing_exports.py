"""Traces that leave the process: settings, limits, and exports that fail."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from io import FileIO, TextIOWrapper
from threading import Event
from typing import Any

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from starlette.datastructures import Headers
from support.fake_engine import MODEL, FakeEngine, proxy_before
from support.tracing import Recorder, collector

from leyline_proxy.observe.turn_traces import messages_sent
from leyline_proxy.settings import Settings
from leyline_proxy.telemetry.tracing.exporting import ReportingExporter, console_exporter
from leyline_proxy.telemetry.tracing.otel import OtelTracing
from leyline_proxy.wiring.tracing import build_tracing

CHAT = "/v1/chat/completions"
ASKED = {"model": MODEL, "messages": [{"role": "user", "content": "Say hello."}]}
NOWHERE = "http://127.0.0.1:9"
"""Nothing listens there."""


@pytest.fixture(autouse=True)
def loggers_of_opentelemetry() -> Iterator[None]:
    """Each test has them as a process of its own would; an exporter changes them for good."""
    names = [name for name in logging.root.manager.loggerDict if name.startswith("opentelemetry")]
    loggers = [logging.getLogger(name) for name in names]
    filters = [list(logger.filters) for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.NOTSET)
    yield
    for logger, before in zip(loggers, filters, strict=True):
        logger.filters[:] = before


@given(
    st.lists(
        st.fixed_dictionaries(
            {"role": st.text(max_size=40)},
            optional={
                "content": st.one_of(
                    st.none(),
                    st.text(),
                    st.integers(),
                    st.lists(st.one_of(st.text(), st.dictionaries(st.text(), st.text()))),
                    st.lists(st.fixed_dictionaries({"text": st.text()})),
                ),
                "tool_calls": st.one_of(
                    st.integers(),
                    st.lists(
                        st.fixed_dictionaries(
                            {"function": st.dictionaries(st.text(), st.text(), max_size=2)}
                        )
                    ),
                ),
            },
        ),
        max_size=6,
    ),
    st.integers(1, 200),
)
def test_content_is_bounded_and_whole(messages: list[dict[str, Any]], limit: int) -> None:
    """The content of any messages is valid JSON with no more text than its limit."""
    shown = json.loads(messages_sent(messages, limit))
    texts = [part["content"] for message in shown for part in message["parts"]]
    assert sum(map(len, texts)) <= limit
    assert len(shown) <= len(messages)


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": [{"type": "text", "text": ""}] * 10_000},
        {"role": "assistant", "tool_calls": [{"function": {"name": ""}}] * 10_000},
        {"role": "user", "content": ""},
    ],
)
def test_content_without_text_takes_no_room(message: dict[str, Any]) -> None:
    """Parts and messages that count for nothing can't swell a span beyond its limit."""
    asked = {"role": "user", "content": "Say hello."}
    shown = messages_sent([asked, *[message] * 5], 50)
    assert json.loads(shown) == [
        {"role": "user", "parts": [{"type": "text", "content": "Say hello."}]}
    ]


def test_callers_words_never_spoil_an_export(recorder: Recorder) -> None:
    """Text that is no UTF-8 and text without end are repaired: an exporter would drop the batch."""
    with recorder.tracing.request("POST", CHAT, Headers({})) as trace:
        trace.describe({"gen_ai.request.model": "\ud800" * 10_000})
        for _ in range(10_000):
            trace.event("leyline.refusal", {"reason": "\udfff"})
    (span,) = recorder.spans()
    assert 100 < len(encode_spans([span]).SerializeToString()) < 10_000


def test_sampler_is_that_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """OTEL_TRACES_SAMPLER says which requests are traced."""
    for sampler, recorded in (("always_off", False), ("always_on", True)):
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
        tracing = build_tracing(Settings(trace="console"), grace_s=0)
        with tracing.request("POST", CHAT, Headers({})) as trace:
            assert trace.recording is recorded


def test_yaml_off_is_off() -> None:
    """A bare ``off`` in YAML, which is read as false, turns tracing off."""
    assert Settings(trace=False).trace == "off"
    with pytest.raises(ValueError, match="trace"):
        Settings(trace=True)


@pytest.fixture
def collector_is_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exports go nowhere, and give up soon."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", NOWHERE)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.2")


@pytest.mark.usefixtures("collector_is_down")
def test_dead_collector_is_told_once(recorder: Recorder) -> None:
    """Batch after batch is lost, and one line says so."""
    with recorder.tracing.request("POST", CHAT, Headers({})):
        pass
    reporting = ReportingExporter(OTLPSpanExporter(), "there:4318")
    with structlog.testing.capture_logs() as lines:
        for _ in range(3):
            reporting.export(recorder.spans())
        reporting.shutdown()
    assert [(line["event"], line["why"]) for line in lines] == [
        ("traces_not_exported", "unreachable")
    ]


@pytest.mark.parametrize(("status", "told"), [(401, "status 401"), (503, "status 429 or 5xx")])
def test_collector_that_comes_back_is_told(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, status: int, told: str
) -> None:
    """A line says how the collector refuses, and one how many spans were lost when it no longer
    does."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1.5")
    for _ in range(2):
        with recorder.tracing.request("POST", CHAT, Headers({})):
            pass
    with collector() as got, structlog.testing.capture_logs() as lines:
        reporting = ReportingExporter(OTLPSpanExporter(f"{got.endpoint}/v1/traces"), "there")
        got.status = status
        reporting.export(recorder.spans())
        got.status = 200
        reporting.export(recorder.spans())
        reporting.shutdown()
    assert [(line["event"], line.get("why"), line.get("lost_spans")) for line in lines] == [
        ("traces_not_exported", told, None),
        ("traces_exported_again", None, 2),
    ]
    assert len(got.spans()) == 2


class _Stuck(SpanExporter):
    """Exports nothing until it is let go."""

    def __init__(self) -> None:
        self.free = Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.free.wait(10)
        return SpanExportResult.SUCCESS


def test_spans_that_find_no_room_are_told_of() -> None:
    """If spans end faster than they are exported, the log says that some are dropped."""
    stuck = _Stuck()
    provider = TracerProvider(sampler=ALWAYS_ON, shutdown_on_exit=False)
    processor = BatchSpanProcessor(
        ReportingExporter(stuck, "there"), max_queue_size=4, max_export_batch_size=2
    )
    provider.add_span_processor(processor)
    tracing = OtelTracing(provider)
    with structlog.testing.capture_logs() as lines:
        for _ in range(20):
            with tracing.request("POST", CHAT, Headers({})):
                pass
        stuck.free.set()
        provider.shutdown()
    assert [line["event"] for line in lines] == ["traces_dropped"]


def test_stdout_that_nobody_reads_is_told_once(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spans for a console that has gone are lost with one line, not with a traceback a batch."""
    with recorder.tracing.request("POST", CHAT, Headers({})):
        pass
    unread, written = os.pipe()
    os.close(unread)
    raw = FileIO(written, "w")
    monkeypatch.setattr("sys.stdout", TextIOWrapper(raw, write_through=True))
    with structlog.testing.capture_logs() as lines:
        exporter = console_exporter()
        for _ in range(3):
            exporter.export(recorder.spans())
        exporter.shutdown()
    raw.close()
    assert [(line["event"], line["collector"]) for line in lines] == [
        ("traces_not_exported", "stdout")
    ]


@pytest.mark.parametrize("trace", ["otlp", "console"])
def test_callers_headers_are_in_no_log(
    trace: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """OpenTelemetry quotes malformed headers in its complaints; the log shows none of it."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", NOWHERE)
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    tracing = build_tracing(Settings(trace=trace), grace_s=0)
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    headers = {"traceparent": parent, "tracestate": "hunter2", "baggage": "hunter2"}
    with tracing.request("POST", CHAT, Headers(headers)):
        pass
    assert "hunter2" not in caplog.text


@pytest.mark.usefixtures("collector_is_down")
async def test_dead_collector_holds_nobody_up() -> None:
    """Requests are served as ever while the collector is away, and the end waits no longer than it
    may."""
    settings = Settings(trace="otlp", trace_flush_s=0.3)
    tracing = build_tracing(settings, grace_s=30)
    engine = FakeEngine()
    async with proxy_before(engine, tracing=tracing) as http:
        for _ in range(20):
            (await http.post(CHAT, json=ASKED, timeout=2)).raise_for_status()
    assert len(engine.bodies) == 20


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc", "http/protobuf"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "collector:4318", "OTEL_EXPORTER_OTLP_ENDPOINT must start"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://[bad", "OTEL_EXPORTER_OTLP_ENDPOINT is no URL"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "a=b,hunter2", "OTEL_EXPORTER_OTLP_HEADERS must be"),
        ("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "100000", "max_queue_size"),
    ],
)
def test_variables_that_cannot_be_met_are_told_at_the_start(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    name: str,
    value: str,
    words: str,
) -> None:
    """A protocol that isn't spoken, an address that is none, a batch above the queue: the error
    says what is wrong, and never quotes credentials."""
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=words) as raised:
        build_tracing(Settings(trace="otlp"), grace_s=1)
    assert "hunter2" not in caplog.text + str(raised.value)


WITHOUT = """
import asyncio, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        # FastAPI brings OpenTelemetry's API; the extra brings these.
        if name.startswith(("opentelemetry.sdk", "opentelemetry.exporter", "opentelemetry.proto")):
            raise ModuleNotFoundError(f"{name} is not installed", name=name)

sys.meta_path.insert(0, Absent())
from support.fake_engine import FakeEngine, MODEL, proxy_before

async def main():
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi."}]}
    async with proxy_before(FakeEngine()) as http:
        (await http.post("/v1/chat/completions", json=body)).raise_for_status()
    assert not any("telemetry.tracing.otel" in name for name in sys.modules)
    try:
        async with proxy_before(FakeEngine(), trace="otlp"):
            raise AssertionError("it started")
    except ValueError as error:
        print(error)

asyncio.run(main())
"""


def test_without_the_extra_the_proxy_runs_and_says_what_to_install() -> None:
    """OpenTelemetry's SDK isn't needed where nothing is traced; else the error names it."""
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT], cwd="tests", capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert "pip install opentelemetry-sdk" in run.stdout


async def test_web_framework_keeps_no_traces_of_its_own(
    monkeypatch: pytest.MonkeyPatch, recorder: Recorder
) -> None:
    """If the process has a provider of its own, the framework's telemetry stays off: its records
    would quote exceptions and queries."""
    monkeypatch.setattr("opentelemetry.trace.get_tracer_provider", lambda: recorder.provider)
    async with proxy_before(FakeEngine()) as http:
        (await http.post(f"{CHAT}?key=hunter2", json=ASKED)).raise_for_status()
    assert not recorder.spans()
