"""``/metrics`` in the forms that Prometheus asks for, of one process and of several."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics
from prometheus_client.parser import text_string_to_metric_families as plain_text
from support.fake_engine import CAPABILITY, MODEL, FakeEngine, proxy_before, tool_session

from leyline_proxy.telemetry.exposition import exposition
from leyline_proxy.telemetry.metrics import Metrics

CHAT = "/v1/chat/completions"
OPEN = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
EXEMPLARS = {"leyline_request_seconds", "leyline_ttft_seconds", "leyline_overhead_seconds"}

WORKER = """
import sys
from leyline_proxy.telemetry.metrics import Metrics
from leyline_proxy.telemetry.exposition import exposition, leave
metrics = Metrics()
running = 3
metrics.watch_replica("a", running=lambda: running, circuit_open=lambda: False)
metrics.observe()
metrics.erasures.labels("done").inc(2)
metrics.ttft_seconds.labels("t", "m", "spliced").observe(0.2, {"message_id": "m-1"})
metrics.upstream_up.labels("a").set(sys.argv[1] != "third")
metrics.claim_hits.labels("t", "c").set(1)
metrics.claim_hits.remove("t", "c")
print("ready", flush=True)
for line in sys.stdin:
    print(exposition({}).text(metrics.registry).decode() + "END", flush=True)
leave()
"""


async def test_open_metrics_lead_to_single_requests() -> None:
    """Asked for OpenMetrics, three histograms name the turn of a measured value, and nothing that
    the caller wrote."""
    engine = FakeEngine(capability=CAPABILITY)
    body = {"model": MODEL, "messages": tool_session(1), "max_tokens": 2}
    async with proxy_before(engine) as client:
        await client.post(CHAT, json=body, headers={"x-leyline-session": "secret-session"})
        answer = await client.get("/metrics", headers={"accept": OPEN})
    assert answer.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    found = {
        family.name: sample.exemplar
        for family in open_metrics(answer.text)
        for sample in family.samples
        if sample.exemplar is not None
    }
    assert set(found) == EXEMPLARS
    assert {name for each in found.values() for name in each.labels} == {"message_id"}
    assert {each.labels["message_id"] for each in found.values()} == set(engine.known_messages)
    assert "secret-session" not in answer.text and "folders" not in answer.text


@pytest.mark.parametrize(
    "accept",
    [
        "",
        "*/*",
        "text/plain",
        "application/openmetrics-text;version=0.0.0",
        "application/openmetrics-text;version=none;;=;escaping",
        "application/openmetrics-text;version=" + "9" * 400,
        ",;=,",
        "image/png",
    ],
)
async def test_anything_else_is_plain_text_or_valid(accept: str) -> None:
    """A scraper's words on formats never break the scrape."""
    asked = exposition({"accept": accept})
    metrics = Metrics()
    metrics.erasures.labels("done").inc()
    text = asked.text(metrics.registry).decode()
    parse = open_metrics if "openmetrics" in asked.content_type else plain_text
    assert "leyline_erasures" in {family.name for family in parse(text)}


@pytest.mark.parametrize("accept", ["", OPEN])
def test_no_series_says_when_another_began(accept: str) -> None:
    """Counters and histograms, with labels and without, are exposed once."""
    metrics = Metrics()
    metrics.ttft_seconds.labels("t", "m", "spliced").observe(0.2)
    text = exposition({"accept": accept}).text(metrics.registry).decode()
    assert "leyline_ttft_seconds_count" in text and "leyline_audit_failures_total" in text
    assert "_created" not in text


async def test_answers_are_compressed_where_that_is_asked_for() -> None:
    """The same text, as gzip, with headers that caches understand."""
    metrics = Metrics()
    asked = exposition({"accept-encoding": "deflate, gzip;q=0.9"})
    text = asked.text(metrics.registry)
    body, headers = asked.answer(text)
    assert (headers["content-encoding"], "accept-encoding" in headers["vary"]) == ("gzip", True)
    assert gzip.decompress(body) == text
    assert "content-encoding" not in exposition({}).answer(text)[1]


@pytest.mark.parametrize("accept", ["", OPEN])
def test_texts_of_disjoint_metrics_are_joined(accept: str) -> None:
    """Another server's answer in the same form makes one valid text with the proxy's."""
    asked = exposition({"accept": accept})
    parse = open_metrics if accept else plain_text
    end = "# EOF\n" if accept else ""
    other = f"# HELP other Others.\n# TYPE other gauge\nother 1.0\n{end}".encode()
    text = asked.joined([asked.text(Metrics().registry), other]).decode()
    families = {family.name for family in parse(text)}
    assert {"other", "leyline_claim_events_missed"} <= families
    assert text.count("# EOF") == (1 if accept else 0)


class _Worker:
    """A process that counts."""

    def __init__(self, folder: Path, name: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-W", "error", "-c", WORKER, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(folder)},
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def scrape(self) -> dict[str, float]:
        """Values of samples without ``le``, by name."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("scrape\n")
        self.process.stdin.flush()
        lines: list[str] = []
        while not lines or not lines[-1].startswith("END"):
            lines.append(self.process.stdout.readline())
        families = plain_text("".join(lines).removesuffix("END\n"))
        samples = [sample for family in families for sample in family.samples]
        return {sample.name: sample.value for sample in samples if "le" not in sample.labels}

    def stop(self, kill: bool = False) -> None:
        if kill:
            self.process.kill()
        self.process.communicate(timeout=30)


def test_several_processes_are_one(tmp_path: Path) -> None:
    """Each scraped process gives the sums of all; the gauges of one that ended or was killed go,
    and its counts stay."""
    workers = [_Worker(tmp_path, name) for name in ("first", "second", "third")]
    try:
        found = workers[0].scrape()
        assert found["leyline_erasures_total"] == 6
        assert found["leyline_ttft_seconds_count"] == 3
        assert found["leyline_upstream_running"] == 9
        assert found["leyline_upstream_up"] == 0
        assert found["leyline_claim_hits"] == 0
        workers[2].stop(kill=True)
        after_kill = workers[1].scrape()
        assert after_kill["leyline_upstream_up"] == 1
        assert after_kill["leyline_upstream_running"] == 6
        workers[1].stop()
        alone = workers[0].scrape()
        assert alone["leyline_upstream_running"] == 3
        assert alone["leyline_erasures_total"] == 6
    finally:
        for worker in workers:
            worker.stop(kill=True)
