"""Claims when the engine is restarted, and what is watched of them: metrics and the audit file."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.claims_engine import ClaimsEngine
from support.fake_engine import MODEL, proxy_before
from support.waiting import until

CLAIMS = "/v1/leyline/claims"
KEYS = {"api_keys": ("red:r",)}
RED = {"authorization": "Bearer r"}


@asynccontextmanager
async def proxy(engine: ClaimsEngine, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a proxy that looks often, after one turn of session ``s``."""
    options = {"claims_interval_s": 0.02, "handshake_interval_s": 0.05, "log_level": "error"}
    async with proxy_before(engine, **{**options, **settings}) as client:
        client.headers.update(RED if "api_keys" in settings else {})
        await turn(client)
        yield client


async def turn(client: httpx.AsyncClient) -> None:
    """One turn."""
    answer = await client.post(
        "/v1/chat/completions",
        json={"model": MODEL, "messages": [{"role": "user", "content": "Go on."}]},
        headers={"x-leyline-session": "s"},
    )
    assert answer.status_code == 200, answer.text


async def submit(client: httpx.AsyncClient, name: str, **members: Any) -> dict[str, Any]:
    """Claim the whole turn."""
    body = {"session": "s", "id": name, "predicate": {}, **members}
    answer = await client.post(CLAIMS, json=body)
    assert answer.status_code == 201, answer.text
    document: dict[str, Any] = answer.json()
    return document


async def samples(client: httpx.AsyncClient, prefix: str) -> dict[str, float]:
    """The series whose names begin so."""
    lines = (await client.get("/metrics")).text.splitlines()
    found = [line.rpartition(" ") for line in lines if line.startswith(prefix)]
    return {name: float(value) for name, _, value in found if "_created" not in name}


async def test_claims_of_a_restarted_engine_are_harmed() -> None:
    """A client that asks gets the state and the cause, in the claim and in its events."""
    engine = ClaimsEngine()
    async with proxy(engine) as client:
        await submit(client, "plan")
        before = (await client.get(f"{CLAIMS}/plan/events")).json()
        engine.restart()
        shown = (await client.get(f"{CLAIMS}/plan")).json()
        events = (await client.get(f"{CLAIMS}/plan/events", params={"after": before["seq"]})).json()
        again = await client.get(f"{CLAIMS}/plan/events", params={"after": events["seq"]})
        listed = (await client.get(CLAIMS)).json()["claims"]
        deleted = await client.delete(f"{CLAIMS}/plan")
        counted = await samples(client, 'leyline_claim_events_total{event="harmed"}')
    assert (shown["state"], shown["cause"]) == ("harmed", "engine_restarted")
    assert shown["resident_tokens"] == 0 and listed == []
    (event,) = events["events"]
    assert (event["event"], event["cause"]) == ("harmed", "engine_restarted")
    assert event["seq"] > before["seq"]
    assert again.json()["events"] == []
    assert (deleted.status_code, deleted.json()["state"]) == (200, "harmed")
    assert list(counted.values()) == [1.0]


async def test_a_harmed_claim_can_be_made_anew() -> None:
    """It names a turn that the new run holds; the old turn is none, and the error says so."""
    engine = ClaimsEngine()
    async with proxy(engine) as client:
        old = await submit(client, "plan")
        engine.restart()
        harmed = (await client.get(f"{CLAIMS}/plan")).json()
        stays = await client.patch(f"{CLAIMS}/plan", json={"revision": 2})
        asked = len(engine.submitted())
        early = await client.post(CLAIMS, json={"session": "s", "predicate": {}})
        unasked = len(engine.submitted()) == asked
        await turn(client)
        anew = await client.patch(f"{CLAIMS}/plan", json={"revision": 2, "predicate": {}})
        shown = (await client.get(f"{CLAIMS}/plan")).json()
    assert harmed["state"] == "harmed"
    assert (stays.status_code, stays.json()["error"]["param"]) == (400, "predicate.source")
    assert (early.status_code, early.json()["error"]["param"]) == (400, "predicate.source")
    assert unasked, "the proxy knows that its turn is of the run before"
    assert anew.status_code == 200
    assert shown["state"] == "materialized"
    assert shown["predicate"]["source"] != old["predicate"]["source"]


async def test_claims_that_ended_before_a_restart_arent_harmed() -> None:
    """A released claim is unknown to the new engine, and nothing went wrong with it."""
    engine = ClaimsEngine()
    async with proxy(engine) as client:
        await submit(client, "plan")
        await client.delete(f"{CLAIMS}/plan")
        engine.restart()
        answer = await client.get(f"{CLAIMS}/plan")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "claim_not_found")


async def test_a_new_proxy_learns_of_live_claims_by_itself() -> None:
    """A later restart of the engine is therefore reported for them, too."""
    engine = ClaimsEngine()
    async with proxy(engine) as client:
        await submit(client, "plan")
    async with proxy(engine) as client:

        async def known() -> bool:
            return bool(await samples(client, "leyline_claim_state{"))

        await until(known)
        engine.restart()
        shown = (await client.get(f"{CLAIMS}/plan")).json()
    assert (shown["state"], shown["cause"]) == ("harmed", "engine_restarted")


async def test_each_live_claim_has_series_until_it_ends() -> None:
    """State, tokens, hits, age and pressure by claim, and sums by tenant and kind."""
    engine = ClaimsEngine()
    async with proxy(engine, **KEYS) as client:
        made = await submit(client, "plan", kind="hard")
        await submit(client, "note", kind="soft")
        engine.book.tell_hit(("red", "plan"))
        engine.pass_time(7)

        async def seen() -> bool:
            ages = await samples(client, 'leyline_claim_age_seconds{claim="plan"')
            return list(ages.values()) == [7.0]

        await until(seen)
        states = await samples(client, "leyline_claim_state{")
        by_claim = {
            name: (await samples(client, f'leyline_claim_{name}{{claim="plan",tenant="red"}}'))
            for name in ("resident_tokens", "hits", "pressure")
        }
        sums = await samples(client, "leyline_claims{")
        await client.delete(f"{CLAIMS}/plan")

        async def gone() -> bool:
            return not await samples(client, 'leyline_claim_age_seconds{claim="plan"')

        await until(gone)
        left = await samples(client, "leyline_claim_")
        sums_left = await samples(client, "leyline_claims{")
    assert len(states) == 2
    assert states['leyline_claim_state{claim="plan",kind="hard",state="materialized",tenant="red"}']
    assert {name: list(values.values()) for name, values in by_claim.items()} == {
        "resident_tokens": [made["resident_tokens"]],
        "hits": [1.0],
        "pressure": [0.0],
    }
    assert sorted(sums.values()) == [1.0, 1.0]
    assert not any('claim="plan"' in name for name in left)
    assert sorted(sums_left.values()) == [0.0, 1.0]


async def test_the_engine_is_left_alone_while_nothing_is_claimed() -> None:
    """One look at its claims when the proxy meets it, and none while none live."""
    engine = ClaimsEngine()
    async with proxy(engine):

        async def looked() -> bool:
            return len(engine.commands) >= 2

        await until(looked)
        await asyncio.sleep(0.1)
        asked = [type(command).__name__ for command in engine.commands]
    assert asked == ["ListClaims", "GetClaimEvents"]


async def test_every_event_is_audited_once(tmp_path: Path) -> None:
    """Over restarts of proxy and engine, each event of each run is one line, in order."""
    engine, audit = ClaimsEngine(), tmp_path / "audit.jsonl"
    settings = {**KEYS, "audit_file": audit}

    def lines() -> list[dict[str, Any]]:
        text = audit.read_text() if audit.exists() else ""
        found = [json.loads(line) for line in text.splitlines()]
        return [
            {**line["event"], "engine": line["engine"]} for line in found if line["kind"] == "claim"
        ]

    async def written() -> bool:
        own = [line["seq"] for line in lines() if line["engine"] == engine.instance]
        return max(own, default=0) >= engine.ledger.last

    async with proxy(engine, **settings) as client:
        await submit(client, "plan", reason="secret words")
        await until(written)
    engine.pass_time(1)
    async with proxy(engine, **settings) as client:
        await submit(client, "note")
        await until(written)
        first, events = engine.instance, engine.ledger.last
        engine.restart()
        assert (await client.get(f"{CLAIMS}/plan")).json()["state"] == "harmed"
        await submit_again(client)
        await until(written)
    found = lines()
    of_first = [line["seq"] for line in found if line["engine"] == first]
    of_second = [line["seq"] for line in found if line["engine"] == engine.instance]
    assert of_first == list(range(1, events + 3)), "all events, and the harm of two claims"
    assert of_second == list(range(1, engine.ledger.last + 1))
    assert {line["tenant"] for line in found if "claim" in line} == {"red"}
    assert "Go on" not in audit.read_text()
    assert audit.stat().st_mode & 0o077 == 0


async def submit_again(client: httpx.AsyncClient) -> None:
    """A claim on the engine's new run."""
    await turn(client)
    await submit(client, "plan", revision=9)


async def test_a_failing_disk_fails_no_request(tmp_path: Path) -> None:
    """The events are counted as lost, and claims continue."""
    engine = ClaimsEngine()
    async with proxy(engine, audit_file=tmp_path) as client:  # a folder can't be written to
        await submit(client, "plan")

        async def failed() -> bool:
            return sum((await samples(client, "leyline_audit_failures_total")).values()) > 0

        await until(failed)
        shown = await client.get(f"{CLAIMS}/plan")
    assert shown.json()["state"] == "materialized"


@pytest.mark.parametrize("kept", [1, 3])
async def test_events_that_were_dropped_unseen_are_counted(kept: int) -> None:
    """A gap in the numbers is reported, not passed over."""
    engine = ClaimsEngine()
    async with proxy(engine) as client:
        await submit(client, "plan")

        async def taken() -> bool:
            counted = await samples(client, "leyline_claim_events_total")
            return sum(counted.values()) >= engine.ledger.last - 1

        await until(taken)
        for _ in range(10):
            engine.pass_time(1)
        events = engine.ledger._events
        while len(events) > kept:
            events.popleft()

        async def missed() -> bool:
            counted = await samples(client, "leyline_claim_events_missed_total")
            return list(counted.values()) == [10.0 - kept]

        await until(missed)
