"""The counts of a turn, before scripted engines."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
from msgspec.structs import replace
from support.fake_engine import (
    CAPABILITY,
    MODEL,
    Answer,
    FakeEngine,
    chat_stream,
    proxy_before,
    tool_session,
)
from support.metrics_page import samples

from leyline_engine.contract import Outcome, Reason, Receipt, TokenCounts
from leyline_engine.contract.capability import KVFacts, RotaryFacts
from leyline_lab.stand_ins.serving import serving
from leyline_proxy.http.app import create_app
from leyline_proxy.model.vocabulary import CAUSES
from leyline_proxy.settings import Settings
from leyline_proxy.upstream.embedded import ASGIStreamTransport, lifespan_of
from leyline_proxy.upstream.rendezvous import ranked

CHAT = "/v1/chat/completions"
PAUSE_S = 0.15
KV = KVFacts(pool_class="gqa", dtype="bfloat16", layers=2, bytes_per_token=64, capacity_tokens=1000)
ROTARY = RotaryFacts(
    rope_type="yarn", pairing="half_split", rotary_dim=16, inv_freq_digest="0" * 16
)


async def values(client: httpx.AsyncClient, name: str) -> dict[tuple[str, ...], float]:
    """Samples of one name by the values of their labels, in the order of the labels' names."""
    return {
        tuple(value for _, value in sorted(sample.labels.items())): sample.value
        for sample in await samples(client, name)
    }


async def series_at_zero(client: httpx.AsyncClient) -> set[tuple[str, tuple[str, ...]]]:
    """Names of samples that are 0, with the values of their labels by the labels' names."""
    return {
        (sample.name, tuple(value for _, value in sorted(sample.labels.items())))
        for sample in await samples(client)
        if sample.value == 0
    }


def body(turns: int, **members: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": tool_session(turns), "max_tokens": 2, **members}


async def test_what_an_engine_is_stands_in_one_series() -> None:
    """Its document's facts are labels; another version takes the place of the one before, and an
    engine that is gone has none."""
    engine = FakeEngine(capability=replace(CAPABILITY, kv=KV, rotary=ROTARY))
    async with proxy_before(engine, handshake_interval_s=0.05) as client:
        assert list(await values(client, "leyline_engine_info")) == [
            ("0.1", "bfloat16", "fake", "1", MODEL, "gqa", "yarn", "engine")
        ]
        engine.capability = replace(CAPABILITY, engine_version="2")
        for _ in range(100):
            found = list(await values(client, "leyline_engine_info"))
            if found == [("0.1", "", "fake", "2", MODEL, "", "", "engine")]:
                break
            await asyncio.sleep(0.05)
        assert len(found) == 1 and found[0][3] == "2"


async def test_overhead_is_neither_the_engine_nor_the_queue() -> None:
    """An engine that takes its time and a request that waits for its turn leave it as it is."""
    engine = FakeEngine(capability=CAPABILITY)
    engine.answers = [chat_stream("Hel", "lo.", pause_s=PAUSE_S) for _ in range(3)]
    async with proxy_before(engine, max_concurrent=1) as client:
        await asyncio.gather(
            *(client.post(CHAT, json=body(turn, stream=True)) for turn in (1, 2, 3))
        )
        (whole,) = (await values(client, "leyline_request_seconds_sum")).values()
        (own,) = (await values(client, "leyline_overhead_seconds_sum")).values()
        (count,) = (await values(client, "leyline_overhead_seconds_count")).values()
        first_tokens = await values(client, "leyline_upstream_ttft_seconds_count")
    assert count == 3 and set(first_tokens.values()) == {3.0}
    assert whole > 3 * 5 * PAUSE_S
    assert 0 < own < whole / 4


async def test_an_engine_that_failed_is_no_overhead_either() -> None:
    """The time that a first attempt took is the engine's that failed it, and the turn counts for
    the engine that served it."""
    engines = {"a": FakeEngine(capability=None), "b": FakeEngine(capability=None)}
    first, second = ranked("s", dict.fromkeys(engines, 1.0))
    engines[first].answers.append(Answer([b"{}"], status=502, pause_s=3 * PAUSE_S))
    with serving(engines["a"]) as one, serving(engines["b"]) as other:
        app = create_app(Settings(upstreams={"a": one, "b": other}, log_level="error"))
        transport = ASGIStreamTransport(app)
        async with (
            lifespan_of(app),
            httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
        ):
            answer = await client.post(CHAT, json=body(1), headers={"x-leyline-session": "s"})
            assert answer.status_code == 200
            assert await values(client, "leyline_failovers_total") == {
                (first,): 1.0,
                (second,): 0.0,
            }
            served = await values(client, "leyline_upstream_turns_total")
            (own,) = (await values(client, "leyline_overhead_seconds_sum")).values()
    assert served == {("unedited", second): 1.0}
    assert 0 < own < PAUSE_S


async def test_avoided_time_is_no_queue_time() -> None:
    """The engine's time measures what a splice spared, however long requests waited."""
    engine = FakeEngine(capability=CAPABILITY)
    tokens = TokenCounts(prompt=2000, spliced=1000, prefilled=1000)
    engine.receipt = lambda message_id: Receipt(
        message_id=message_id, outcome=Outcome.SPLICED, reason=Reason.SPLICED, tokens=tokens
    )
    engine.answers = [chat_stream("Hel", "lo.", pause_s=PAUSE_S) for _ in range(4)]
    async with proxy_before(engine, max_concurrent=1) as client:
        assert set((await values(client, "leyline_prefill_avoided_seconds_total")).values()) <= {0}
        await asyncio.gather(*(client.post(CHAT, json=body(1, stream=True)) for _ in range(3)))
        (before,) = (await values(client, "leyline_prefill_avoided_seconds_total")).values()
        await client.post(CHAT, json=body(1, stream=True))
        (after,) = (await values(client, "leyline_prefill_avoided_seconds_total")).values()
        (count,) = (await values(client, "leyline_prefill_avoided_tokens_total")).values()
    assert count == 4000
    assert PAUSE_S / 2 < after - before < 4 * PAUSE_S


async def test_series_stand_before_their_first_event() -> None:
    """Series that a rate must not miss are at 0 after the first turn of a tenant on a model; those
    without a tenant are so from the start."""
    engine = FakeEngine(capability=CAPABILITY)
    async with proxy_before(engine) as client:
        at_once = await series_at_zero(client)
        await client.post(CHAT, json=body(1))
        after = await series_at_zero(client)
    assert {
        ("leyline_erasures_total", ("pending",)),
        ("leyline_erasures_owed", ()),
        ("leyline_failovers_total", ("engine",)),
        ("leyline_key_reloads_total", ("refused",)),
        ("leyline_policy_reloads_total", ("refused",)),
    } <= at_once
    own = {
        ("leyline_claim_refusals_total", ("default",)),
        ("leyline_limited_requests_total", ("queue_full", "default")),
        ("leyline_prefill_avoided_tokens_total", (MODEL, "default")),
        ("leyline_receipts_missing_total", (MODEL,)),
        *(("leyline_cache_busts_total", (cause, MODEL, "default")) for cause in CAUSES),
        *(("leyline_cache_bust_tokens_total", (cause, MODEL, "default")) for cause in CAUSES),
    }
    assert own <= after and not own & at_once


async def test_the_scheduler_tells_what_it_decided() -> None:
    """Edits of a turn wait, later all are sent at once, and turns without any say so."""
    engine = FakeEngine(capability=None)
    policy = "truncate_older_than:n=2,max_chars=80"
    async with proxy_before(engine, policy=policy, edit_carry=0.05) as client:
        for turn in range(1, 14):
            await client.post(CHAT, json=body(turn), headers={"x-leyline-session": "waits"})
        found = await values(client, "leyline_schedule_decisions_total")
    assert {key for key, count in found.items() if count} == {("nothing",), ("held",), ("pays",)}
    assert sum(found.values()) == 12


async def test_a_turn_is_accounted_for_by_its_receipt() -> None:
    """Tokens by tenant and by engine add up to the receipts', outputs to what was recorded."""
    engine = FakeEngine(capability=CAPABILITY)
    async with proxy_before(engine) as client:
        for turn in (1, 2):
            await client.post(CHAT, json=body(turn))
        by_engine = await values(client, "leyline_upstream_prompt_tokens_total")
        by_tenant = await values(client, "leyline_prompt_tokens_total")
        completed = await values(client, "leyline_completion_tokens_total")
    assert by_engine == {
        ("cached", "engine"): 8.0,
        ("prefilled", "engine"): 12.0,
        ("spliced", "engine"): 0.0,
        ("reused", "engine"): 0.0,
    }
    assert sum(by_tenant.values()) == 20
    assert completed == {(MODEL, "default"): 4.0}
