"""Claims over HTTP: taken, shown, revised, released and refused, each tenant its own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from support.claims_engine import ClaimsEngine, text_of
from support.fake_engine import MODEL, FakeEngine, proxy_before

CHAT, CLAIMS = "/v1/chat/completions", "/v1/leyline/claims"
MESSAGES = [
    {"role": "system", "content": "You keep notes."},
    {"role": "user", "content": "The plan is to begin with the first file."},
    {"role": "user", "content": "Go on."},
]
KEYS = {"api_keys": ("red:r", "blue:b")}
RED, BLUE = {"authorization": "Bearer r"}, {"authorization": "Bearer b"}


@asynccontextmanager
async def proxy(engine: Any, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a proxy before ``engine``, that looks at claims only when something changes."""
    async with proxy_before(engine, **{"claims_interval_s": 60, **settings}) as client:
        yield client


async def chat(
    client: httpx.AsyncClient,
    messages: list[dict[str, Any]] | None = None,
    *,
    session: str = "s",
    **options: Any,
) -> httpx.Response:
    """One turn of a session."""
    headers = {"x-leyline-session": session, **options.pop("headers", {})}
    body = {"model": MODEL, "messages": messages or MESSAGES, **options}
    return await client.post(CHAT, json=body, headers=headers)


def claim(**members: Any) -> dict[str, Any]:
    """A hard claim over the second message of session ``s``."""
    return {"session": "s", "kind": "hard", "predicate": {"messages": [1, 2]}, **members}


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error, which has OpenAI's members."""
    error: dict[str, Any] = response.json()["error"]
    assert {"message", "type", "param", "code"} <= set(error)
    return error


async def test_a_claim_goes_its_way_from_post_to_delete() -> None:
    """It is accepted over the message's tokens, shown, listed, revised, and ends as released."""
    engine = ClaimsEngine()
    async with proxy(engine) as client:
        turn = (await chat(client)).json()["leyline"]["turn"]
        made = await client.post(CLAIMS, json=claim(id="plan", ttl_s=60, reason="the plan"))
        listed = (await client.get(CLAIMS)).json()["claims"]
        revised = await client.patch(f"{CLAIMS}/plan", json={"revision": 2, "kind": "soft"})
        released = await client.delete(f"{CLAIMS}/plan")
        shown = (await client.get(f"{CLAIMS}/plan")).json()
        left = (await client.get(CLAIMS)).json()["claims"]
        kinds = (await client.get(f"{CLAIMS}/plan/events")).json()["events"]
    assert (made.status_code, made.headers["location"]) == (201, f"{CLAIMS}/plan")
    document = made.json()
    assert listed == [document]
    assert (document["state"], document["predicate"]["source"]) == ("materialized", turn)
    start, end = document["predicate"]["start"], document["predicate"]["end"]
    between = "<|im_end|><|im_start|>user\n"
    assert text_of(MESSAGES, start, end) == f"{between}{MESSAGES[1]['content']}{between}"
    assert document["resident_tokens"] == document["required_tokens"] == end - start
    terms = revised.json()
    assert (terms["kind"], terms["revision"], terms["ttl_s"]) == ("soft", 2, 60)
    assert terms["predicate"] == document["predicate"]
    assert (released.status_code, released.json()["state"]) == (200, "released")
    assert shown["state"] == "released" and left == []
    names = [event["event"] for event in kinds]
    assert names.index("locked") < names.index("ranked") < names.index("released")
    assert all("tenant" not in event and "runs" not in event for event in kinds)


async def test_an_id_is_made_where_none_is_given() -> None:
    """Two claims without ids are two claims."""
    async with proxy(ClaimsEngine()) as client:
        await chat(client)
        first, second = [(await client.post(CLAIMS, json=claim())).json() for _ in range(2)]
    assert first["id"] != second["id"]


async def test_the_list_can_be_of_one_session() -> None:
    """Claims of other sessions aren't in it; an unknown one has none."""
    async with proxy(ClaimsEngine()) as client:
        await chat(client, session="s")
        await chat(client, session="t")
        for session in ("s", "t"):
            await client.post(CLAIMS, json=claim(id=session, session=session))
        found = {
            session: [
                c["id"] for c in (await client.get(f"{CLAIMS}?session={session}")).json()["claims"]
            ]
            for session in ("s", "t", "u")
        }
    assert found == {"s": ["s"], "t": ["t"], "u": []}


async def test_tokens_of_an_older_turn_can_be_claimed() -> None:
    """A source is named as the answers name turns; without start and end it is claimed whole."""
    engine = ClaimsEngine()
    async with proxy(engine) as client:
        first = (await chat(client)).json()["leyline"]["turn"]
        await chat(client, [*MESSAGES, {"role": "user", "content": "And on."}])
        body = claim(predicate={"source": first, "share": 0.5})
        made = (await client.post(CLAIMS, json=body)).json()
    length = engine.sources[first]
    assert made["predicate"] == {"source": first, "start": 0, "end": length, "share": 0.5}


async def test_another_tenants_claim_is_as_unknown_as_none() -> None:
    """Every way to it is answered like an id that never was, and the claim stays as it is."""
    engine = ClaimsEngine()
    async with proxy(engine, **KEYS) as client:
        await chat(client, headers=RED)
        await client.post(CLAIMS, json=claim(id="plan"), headers=RED)
        answers = {}
        for name in ("plan", "none"):
            path = f"{CLAIMS}/{name}"
            answers[name] = [
                (answer.status_code, answer.content)
                for answer in (
                    await client.get(path, headers=BLUE),
                    await client.get(f"{path}/events", headers=BLUE),
                    await client.delete(path, headers=BLUE),
                    await client.patch(path, json={"revision": 9}, headers=BLUE),
                )
            ]
        foreign = (await client.get(CLAIMS, headers=BLUE)).json()["claims"]
        session = await client.post(CLAIMS, json=claim(), headers=BLUE)
    assert answers["plan"] == answers["none"]
    assert {status for status, _ in answers["plan"]} == {404}
    assert foreign == [] and [status.state for status in engine.live()] == ["materialized"]
    assert (session.status_code, error_of(session)["code"]) == (404, "session_not_found")


@pytest.mark.parametrize(
    ("members", "param"),
    [
        ({"ttl_s": 0}, "ttl_s"),
        ({"ttl_s": 100 * 365 * 24 * 3600}, "ttl_s"),
        ({"priority": 101}, "priority"),
        ({"revision": 0}, "revision"),
        ({"kind": "firm"}, "kind"),
        ({"id": "a/b"}, "id"),
        ({"extra": 1}, "extra"),
        ({"reason": "r" * 257}, "reason"),
        ({"predicate": {"messages": [1, 4]}}, "predicate.messages"),
        ({"predicate": {"messages": [2, 2]}}, "predicate.messages"),
        ({"predicate": {"messages": [-1, 2]}}, "predicate.messages"),
        ({"predicate": {"messages": [0, 1], "end": 4}}, "predicate.end"),
        ({"predicate": {"start": 0, "end": 10**6}}, "predicate.end"),
        ({"predicate": {"start": 5, "end": 5}}, "predicate.end"),
        ({"predicate": {"start": -1}}, "predicate.start"),
        ({"predicate": {"share": 0}}, "predicate.share"),
        ({"predicate": {"source": "t9-none"}}, "predicate.source"),
        ({"predicate": {"begin": 1}}, "predicate.begin"),
        ({"predicate": [1, 2]}, "predicate"),
    ],
)
async def test_what_is_impossible_is_named(members: dict[str, Any], param: str) -> None:
    """A claim that can't be is a 400 whose param is the field, and nothing is claimed."""
    engine = ClaimsEngine()
    async with proxy(engine) as client:
        await chat(client)
        answer = await client.post(CLAIMS, json=claim(**members))
    error = error_of(answer)
    assert (answer.status_code, error["code"], error["param"]) == (400, "invalid_claim", param)
    assert not engine.submitted()


@pytest.mark.parametrize("field", ["session", "predicate"])
async def test_what_is_missing_is_named(field: str) -> None:
    """A claim without a session or a predicate is a 400 that names it."""
    body = claim()
    del body[field]
    async with proxy(ClaimsEngine()) as client:
        answer = await client.post(CLAIMS, json=body)
    assert (answer.status_code, error_of(answer)["param"]) == (400, field)


async def test_limits_are_named() -> None:
    """A claim too many is a 429 whose param is the limit."""
    async with proxy(ClaimsEngine(claims=1)) as client:
        await chat(client)
        first = await client.post(CLAIMS, json=claim(id="a"))
        second = await client.post(CLAIMS, json=claim(id="b"))
    error = error_of(second)
    assert (first.status_code, second.status_code) == (201, 429)
    assert (error["code"], error["param"]) == ("claim_limit", "claims")


@pytest.mark.parametrize("revision", [1, 2])
async def test_an_older_or_equal_revision_is_refused(revision: int) -> None:
    """The later one stays as it is."""
    engine = ClaimsEngine()
    async with proxy(engine) as client:
        await chat(client)
        await client.post(CLAIMS, json=claim(id="plan", revision=2))
        answer = await client.patch(f"{CLAIMS}/plan", json={"revision": revision, "priority": 9})
    assert (answer.status_code, error_of(answer)["code"]) == (409, "stale_revision")
    assert error_of(answer)["param"] == "revision"
    assert engine.live()[0].claim.priority == 0


async def test_a_revision_can_mean_other_tokens() -> None:
    """A predicate in a PATCH is mapped as in a POST; an unknown member is named."""
    engine = ClaimsEngine()
    async with proxy(engine) as client:
        await chat(client)
        await client.post(CLAIMS, json=claim(id="plan"))
        body = {"revision": 2, "predicate": {"start": 0, "end": 4}, "ttl_s": 5}
        answer = (await client.patch(f"{CLAIMS}/plan", json=body)).json()
        wrong = await client.patch(f"{CLAIMS}/plan", json={"revision": 3, "session": "t"})
    assert (answer["predicate"]["end"], answer["expires_in_s"]) == (4, 5.0)
    assert error_of(wrong)["param"] == "session"


async def test_an_engine_without_claims_says_so() -> None:
    """Every route is a 501, whether the engine has a capability document or none."""
    for engine in (FakeEngine(), FakeEngine(capability=None)):
        async with proxy(engine) as client:
            await chat(client)
            answers = [
                await client.post(CLAIMS, json=claim()),
                await client.get(CLAIMS),
                await client.delete(f"{CLAIMS}/plan"),
            ]
        assert [answer.status_code for answer in answers] == [501] * 3
        assert {error_of(answer)["code"] for answer in answers} == {"claims_unsupported"}


async def test_an_engine_that_fails_is_the_engines_fault() -> None:
    """Its error is a 502, not the caller's."""
    engine = ClaimsEngine()
    async with proxy(engine) as client:
        await chat(client)
        engine.failing = True
        answer = await client.post(CLAIMS, json=claim())
    assert (answer.status_code, error_of(answer)["type"]) == (502, "upstream_error")


@pytest.mark.parametrize(("mine", "status"), [("secret", 201), ("other", 502)])
async def test_commands_are_signed(mine: str, status: int) -> None:
    """An engine with a secret obeys a sender that shares it; any other learns what to look at."""
    engine = ClaimsEngine(secret="secret")
    async with proxy(engine, hints_secret=mine) as client:
        await chat(client)
        answer = await client.post(CLAIMS, json=claim())
    assert answer.status_code == status
    if status == 502:
        assert "hints_secret" in error_of(answer)["message"]
    assert len(engine.live()) == (status == 201)


async def test_bodies_are_bounded() -> None:
    """A long body is refused by its length, one that is no JSON by its form."""
    async with proxy(ClaimsEngine()) as client:
        long = await client.post(CLAIMS, json=claim(reason="r" * 100_000))
        broken = await client.post(CLAIMS, content=b"{")
    assert (long.status_code, error_of(long)["code"]) == (413, "request_too_large")
    assert (broken.status_code, error_of(broken)["code"]) == (400, "invalid_json")


async def test_events_are_read_in_pages() -> None:
    """``seq`` of a page is where the next one continues; numbers below zero are an error."""
    async with proxy(ClaimsEngine()) as client:
        await chat(client)
        await client.post(CLAIMS, json=claim(id="plan"))
        whole = (await client.get(f"{CLAIMS}/plan/events")).json()["events"]
        paged: list[Any] = []
        after = 0
        for _ in range(len(whole) + 1):
            answer = await client.get(f"{CLAIMS}/plan/events", params={"after": after, "limit": 1})
            paged += answer.json()["events"]
            after = answer.json()["seq"]
        wrong = await client.get(f"{CLAIMS}/plan/events?after=-1")
    assert paged == whole and len(whole) > 2
    assert (wrong.status_code, error_of(wrong)["param"]) == (400, "after")


async def test_a_restarted_proxy_loses_no_claim() -> None:
    """The next one shows, lists and releases what the one before was asked for."""
    engine = ClaimsEngine()
    async with proxy(engine) as client:
        await chat(client)
        await client.post(CLAIMS, json=claim(id="plan"))
    async with proxy(engine) as client:
        shown = (await client.get(f"{CLAIMS}/plan")).json()
        kept = await client.patch(f"{CLAIMS}/plan", json={"revision": 2, "ttl_s": 9})
        released = await client.delete(f"{CLAIMS}/plan")
    assert shown["state"] == "materialized"
    assert (kept.status_code, kept.json()["ttl_s"]) == (200, 9)
    assert released.json()["state"] == "released"
