"""``leyline serve`` with a collector: what leaves the process, and what stays in it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.fake_engine import MODEL, FakeEngine
from support.tracing import Collector, collector

from leyline_lab.stand_ins.serving import serving

LEYLINE = str(Path(sys.executable).parent / "leyline")
PATIENCE_S = 30.0
PROMPT = "Where is the crimson walrus?"
TRACE = "0af7651916cd43dd8448eb211c80319c"


@contextmanager
def traced_proxy(tmp_path: Path, engine: str, endpoint: str, **env: str) -> Iterator[str]:
    """The origin of a proxy whose spans go to ``endpoint``; stopped by SIGTERM."""
    command = [LEYLINE, "serve", "--port", "0", "--upstream", engine, "--trace", "otlp"]
    environment = os.environ | {
        "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
        "OTEL_SERVICE_NAME": "agents-proxy",
        # Nothing is exported before the end, so that the end has to.
        "OTEL_BSP_SCHEDULE_DELAY": "600000",
        **env,
    }
    log = (tmp_path / "log").open("w")
    with (
        log,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment
        ) as process,
    ):
        try:
            assert process.stdout is not None
            lines = iter(process.stdout.readline, "")
            line = next((line for line in lines if "base_url" in line), "")
            assert line, (tmp_path / "log").read_text()
            yield line.split()[-1].removesuffix("/v1")
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(PATIENCE_S)


def ask(origin: str) -> None:
    """One turn of a traced client."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": PROMPT}]}
    headers = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01", "x-leyline-session": "s1"}
    httpx.post(
        f"{origin}/v1/chat/completions", json=body, headers=headers, timeout=20
    ).raise_for_status()


def logged(tmp_path: Path) -> list[dict[str, Any]]:
    """The proxy's log."""
    return [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]


def resource(got: Collector) -> dict[str, str]:
    """The resource that the spans came from."""
    attributes = got.requests[0].resource_spans[0].resource.attributes
    return {item.key: item.value.string_value for item in attributes}


@pytest.fixture(scope="module")
def engine() -> Iterator[str]:
    with serving(FakeEngine()) as origin:
        yield origin


@pytest.mark.parametrize("content", [False, True])
def test_collector_gets_all_spans_and_no_prompt(tmp_path: Path, engine: str, content: bool) -> None:
    """A collector is given a turn's spans by the time the proxy has stopped; the prompt's words are
    in their bytes only where the switch says so, and log lines name the trace."""
    with ExitStack() as stack:
        got = stack.enter_context(collector())
        with traced_proxy(
            tmp_path, engine, got.endpoint, LEYLINE_TRACE_CONTENT=str(content)
        ) as origin:
            ask(origin)
            assert not got.requests
        spans = {span.name: span for span in got.spans()}
    root = spans["POST /v1/chat/completions"]
    assert {"identify", "policy", "diff", "render", "decide", "upstream", "account"} <= spans.keys()
    assert all(span.trace_id.hex() == TRACE for span in spans.values())
    assert all(span.parent_span_id == root.span_id for span in spans.values() if span is not root)
    assert got.holds("gen_ai.usage.input_tokens")
    assert got.holds("crimson walrus") == content
    assert resource(got)["service.name"] == "agents-proxy"
    (turn,) = [line for line in logged(tmp_path) if line["event"] == "turn"]
    assert turn["trace_id"] == TRACE


@pytest.mark.nightly
def test_dead_collector_delays_neither_turns_nor_the_end(tmp_path: Path, engine: str) -> None:
    """Without its collector, the proxy answers as ever, stops soon, and says once what is lost."""
    env = {"OTEL_BSP_SCHEDULE_DELAY": "50", "OTEL_EXPORTER_OTLP_TIMEOUT": "0.5"}
    with traced_proxy(tmp_path, engine, "http://127.0.0.1:9", **env) as origin:
        ask(origin)  # connections are made
        started = time.perf_counter()
        for _ in range(10):
            ask(origin)
        assert time.perf_counter() - started < 10
        time.sleep(2)
        stopping = time.perf_counter()
    assert time.perf_counter() - stopping < 15
    events = [line["event"] for line in logged(tmp_path)]
    assert events.count("traces_not_exported") == 1
    assert not any("opentelemetry" in str(line) for line in logged(tmp_path))
