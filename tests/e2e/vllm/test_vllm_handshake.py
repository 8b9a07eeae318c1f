"""The proxy before a real vLLM server: its handshake, its doctor, and its rendering.

vLLM lives in an environment of its own; without it these tests are skipped.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from support.sglang_stack import API_KEY, HINTS_SECRET

from leyline_lab.stand_ins.serving import serving
from leyline_proxy.doctor.engines import EngineNeeds, examine_engine
from leyline_proxy.doctor.findings import Status
from leyline_proxy.http.app import create_app
from leyline_proxy.settings import Settings
from leyline_proxy.upstream.client import UpstreamClient
from leyline_proxy.upstream.link import Link
from leyline_proxy.upstream.proof import examine_rendering

REPOSITORY = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(REPOSITORY / "tests" / "vllm" / "support"))

from vllm_server import VllmServer  # noqa: E402 - beside the plugin's tests

MODEL = "leyline-random"


@pytest.fixture
async def client(engine: VllmServer) -> AsyncIterator[UpstreamClient]:
    """The proxy's client of the engine."""
    link = Link(engine.base_url, httpx.AsyncHTTPTransport())
    opened = UpstreamClient(link, api_key=API_KEY, hints_secret=HINTS_SECRET)
    yield opened
    await opened.aclose()


async def test_the_rendering_is_proven(client: UpstreamClient) -> None:
    """All probe conversations give vLLM's own tokens: with tools, thinking, parts and options."""
    rendering = await examine_rendering(client, MODEL)
    assert (rendering.problem, rendering.proven) == ("", True)


async def test_the_doctor_finds_the_engine_well(client: UpstreamClient) -> None:
    """It is reachable, takes the key, lists its model, and renders alike."""
    needs = EngineNeeds("engine", client, None, False, False, 1 << 30)
    findings = {finding.name: finding for finding in await examine_engine(needs)}
    for name in ("reachable", "key", "models", "tokenizer"):
        assert findings[f"upstream.engine.{name}"].status is Status.OK, findings


def test_a_chat_is_served_through_the_proxy(engine: VllmServer) -> None:
    """The proxy is ready, renders prompts itself, and passes vLLM's answer on."""
    values = {"upstream": engine.base_url, "upstream_api_key": API_KEY}
    values |= {"hints_secret": HINTS_SECRET, "log_level": "warning"}
    with serving(create_app(Settings.model_validate(values))) as origin:
        upstream = httpx.get(f"{origin}/readyz", timeout=60).json()["upstreams"][0]
        assert (upstream["engine"], upstream["rendering"]) == ("vllm", "local"), upstream
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi."}], "max_tokens": 4}
        answer = httpx.post(f"{origin}/v1/chat/completions", json=body, timeout=60)
        assert answer.raise_for_status().json()["choices"][0]["finish_reason"]
