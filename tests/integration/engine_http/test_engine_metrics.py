"""The embedded engine's ``/metrics``, alone and as part of the proxy's."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import msgspec
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_families
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from support.engine_http import client_of, hints, is_idle, record_of
from support.waiting import wait

from leyline_engine.claims.limits import Limits
from leyline_engine.contract import (
    CLAIMS_PATH,
    Claim,
    ClaimKind,
    Directive,
    Predicate,
    SourceRef,
    SubmitClaim,
    apply_directives,
    token_digest,
)
from leyline_engine.contract.metrics import ENGINE_METRICS
from leyline_lab.stand_ins.serving import check_clean, serving
from leyline_proxy.http.app import create_app
from leyline_proxy.settings import Settings
from leyline_replay.factory import serve_model
from leyline_replay.http.app import ServingOptions
from leyline_replay.models.loader import LoadedModel

POOL = 600
OPEN_METRICS = {"accept": "application/openmetrics-text; version=1.0.0"}


@pytest.fixture
def small(loaded: LoadedModel) -> Iterator[Starlette]:
    """An engine with a small pool, all of which may be claimed."""
    app = serve_model(loaded, pool_tokens=POOL, claim_limits=Limits(share=1.0, engine_share=1.0))
    yield app
    app.state.shutdown()
    check_clean(app)


async def series(app: Starlette) -> dict[tuple[str, ...], float]:
    """Samples by name and label values, when nothing runs."""
    wait(lambda: is_idle(app) and app.state.service._idle_checked)
    async with client_of(app) as client:
        text = (await client.get("/metrics")).raise_for_status().text
    return {
        (sample.name.removeprefix("leyline_engine_"), *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def complete(app: Starlette, prompt: list[int], name: str, **payload: object) -> int:
    body = {
        "prompt": prompt,
        "max_tokens": 4,
        "temperature": 0,
        "ignore_eos": True,
        "custom_params": hints(name, turn=name, **payload),
    }
    async with client_of(app) as client:
        return (await client.post("/v1/completions", json=body)).status_code


async def test_splice_claim_and_refusal_show(small: Starlette) -> None:
    """Owners sum to the pool at each step, and what happened is counted once."""
    engine = small.state.service._engine
    empty = await series(small)
    assert empty["pool_tokens", "free"] == empty["pool_capacity_tokens",] == POOL
    source = [7 + n % 300 for n in range(200)]
    assert await complete(small, source, "t1") == 200
    tokens = [*source, *(await record_of(small, "t1"))["output_ids"]]
    edit = Directive(60, 90, (5,))
    prompt = [*apply_directives(tokens, (edit,)), 8, 9]
    sources = (SourceRef("t1", len(tokens), token_digest(tokens)),)
    assert await complete(small, prompt, "t2", sources=sources, directives=(edit,)) == 200
    receipt = (await record_of(small, "t2"))["receipt"]
    spliced = receipt["tokens"]["spliced"]
    assert spliced > 100
    now = await series(small)
    assert now["requests_total", "spliced", "spliced"] == 1
    assert now["requests_total", "unedited", "none"] == 1
    assert now["tokens_total", "spliced"] == spliced
    bytes_per_token = engine.capability.kv.bytes_per_token
    assert now["splice_bytes_total",] == spliced * bytes_per_token
    assert now["splice_seconds_count",] == 1
    behind = receipt["lineage"][0]["start"]
    assert now["pool_tokens", "spliced"] == len(prompt) + 3 - behind
    # The replacement, too, was computed only from the text before it.
    assert now["pool_tokens", "exact"] == len(tokens) - 1 + behind - edit.start
    assert (now["retained_turns",], now["lineages",]) == (2, 1)
    assert now["retained_tokens",] == len(tokens) + len(prompt) + 4
    claim = Claim(
        id="c",
        tenant="tenant",
        session="s",
        kind=ClaimKind.HARD,
        predicate=Predicate("t1", 0, 200),
    )
    async with client_of(small) as client:
        command = msgspec.json.encode(SubmitClaim(claim))
        (await client.post(CLAIMS_PATH, content=command)).raise_for_status()
    assert await complete(small, [3] * (POOL - 150), "t3") == 503
    claimed = await series(small)
    assert claimed["pool_tokens", "claimed"] == 200
    assert claimed["pool_tokens", "exact"] == now["pool_tokens", "exact"] - 200
    assert claimed["refusals_total",] == 1
    assert claimed["requests_total", "reprefilled", "refused_by_claim"] == 1
    assert sum(v for key, v in claimed.items() if key[0] == "pool_tokens") == POOL


async def test_the_secret_guards_the_metrics(loaded: LoadedModel) -> None:
    """They need it like everything but the health of an engine that asks for one."""
    app = serve_model(loaded, pool_tokens=POOL, options=ServingOptions(api_secret="secret"))
    try:
        async with client_of(app) as client:
            assert (await client.get("/metrics")).status_code == 401
            allowed = await client.get("/metrics", headers={"authorization": "Bearer secret"})
        assert "leyline_engine_pool_capacity_tokens 600.0" in allowed.text
    finally:
        app.state.shutdown()


def test_the_proxys_metrics_have_the_embedded_engines(small: Starlette) -> None:
    """Each once, under names that the proxy has none of, in either format."""
    with serving(create_app(Settings(), engine_app=small)) as origin:
        plain = httpx.get(f"{origin}/metrics").raise_for_status()
        opened = httpx.get(f"{origin}/metrics", headers=OPEN_METRICS).raise_for_status()
    specified = {spec.name for spec in ENGINE_METRICS}
    for families in (
        list(text_string_to_metric_families(plain.text)),
        list(open_families(opened.text)),
    ):
        names = [family.name for family in families]
        assert len(names) == len(set(names))
        assert specified <= set(names)
        assert "leyline_build" in {name.removesuffix("_info") for name in names}
    assert opened.text.count("# EOF") == 1
