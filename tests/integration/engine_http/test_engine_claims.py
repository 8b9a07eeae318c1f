"""Claims over HTTP: commands, refusals, and what becomes of requests beside them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import msgspec
import pytest
from starlette.applications import Starlette
from support.engine_http import client_of, hints, record_of, served
from support.waiting import until

from leyline_engine.claims.limits import Limits
from leyline_engine.contract import (
    CLAIMS_PATH,
    MAX_COMMAND_BYTES,
    SIGNATURE_HEADER,
    Claim,
    ClaimCommand,
    ClaimKind,
    ClaimReply,
    ClaimState,
    GetClaim,
    GetClaimEvents,
    ListClaims,
    Predicate,
    ReleaseClaim,
    SubmitClaim,
    sign_bytes,
)
from leyline_lab.stand_ins.serving import check_clean
from leyline_replay.factory import create_engine_app, read_limits, serve_model
from leyline_replay.http.app import ServingOptions
from leyline_replay.models.loader import LoadedModel

POOL = 600
OpenApp = Callable[..., Starlette]


@pytest.fixture
def open_app(loaded: LoadedModel) -> Iterator[OpenApp]:
    """Engines with a small pool, checked for leaks afterwards."""
    made: list[Starlette] = []

    def opened(pool: int = POOL, secret: str | None = None, **limits: Any) -> Starlette:
        app = serve_model(
            loaded,
            pool_tokens=pool,
            options=ServingOptions(default_max_tokens=12, hints_secret=secret),
            claim_limits=Limits(**({"share": 1.0, "engine_share": 1.0} | limits)),
        )
        made.append(app)
        return app

    yield opened
    for app in made:
        app.state.shutdown()
        check_clean(app)


def ids(count: int, seed: int) -> list[int]:
    """Token ids that begin as no other seed's."""
    return [seed, *(100 + (seed * 31 + n * 7) % 300 for n in range(count - 1))]


async def complete(app: Starlette, prompt: list[int], message: str, **more: Any) -> httpx.Response:
    """One completion of four tokens under an envelope."""
    payload = {"session": "s", "scope": "t", "turn": message} | more.pop("payload", {})
    body = {
        "prompt": prompt,
        "max_tokens": 4,
        "temperature": 0,
        "ignore_eos": True,
        "custom_params": hints(message, **payload),
    }
    async with client_of(app) as client:
        return await client.post("/v1/completions", json=body | more)


async def post(app: Starlette, body: bytes, **headers: str) -> httpx.Response:
    """One command as bytes."""
    async with client_of(app) as client:
        return await client.post(CLAIMS_PATH, content=body, headers=headers)


async def do(app: Starlette, command: ClaimCommand) -> ClaimReply:
    """One command and its reply."""
    response = await post(app, msgspec.json.encode(command))
    assert response.status_code == 200, response.text
    return msgspec.json.decode(response.content, type=ClaimReply)


def claim(source: str, end: int, **terms: Any) -> SubmitClaim:
    """A hard claim over the beginning of a turn, unless terms say otherwise."""
    given = {"id": "c", "tenant": "t", "session": "s", "kind": ClaimKind.HARD} | terms
    return SubmitClaim(Claim(predicate=Predicate(source, 0, end), **given))


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error of an answer."""
    error: dict[str, Any] = response.json()["error"]
    return error


async def test_a_refusal_is_a_503_until_the_claim_is_released(open_app: OpenApp) -> None:
    """Named, attributed, with a receipt; no ``Retry-After`` where it takes a release."""
    app = open_app()
    await complete(app, ids(300, 1), "plan")
    reply = await do(app, claim("plan", 300))
    assert reply.claims[0].state is ClaimState.MATERIALIZED
    for stream in (False, True):
        response = await complete(app, ids(400, 2), f"big{stream}", stream=stream)
        assert response.status_code == 503
        error = error_of(response)
        assert (error["code"], error["type"]) == ("refused_by_claim", "server_error")
        assert "yours (c)" in error["message"]
        assert "retry-after" not in response.headers
        receipt = (await record_of(app, f"big{stream}"))["receipt"]
        assert (receipt["outcome"], receipt["reason"]) == ("reprefilled", "refused_by_claim")
        assert receipt["refused"]["own"] == ["c"]
    assert (await do(app, ReleaseClaim("t", "c"))).claims[0].state is ClaimState.RELEASED
    assert (await complete(app, ids(400, 2), "again")).status_code == 200


async def test_retry_after_is_the_time_until_the_deadline(open_app: OpenApp) -> None:
    """The request is served when it has passed."""
    app = open_app()
    await complete(app, ids(300, 1), "plan")
    await do(app, claim("plan", 300, ttl_s=1))
    response = await complete(app, ids(400, 2), "big")
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    await asyncio.sleep(1.05)
    assert (await complete(app, ids(400, 2), "again")).status_code == 200
    assert (await do(app, GetClaim("t", "c"))).claims[0].state is ClaimState.EXPIRED


async def test_two_tenants_hear_of_each_other_as_numbers(open_app: OpenApp) -> None:
    """Ids are their own; a tenant without a claim gets nothing but the number."""
    app = open_app()
    await complete(app, ids(200, 1), "hers")
    await complete(app, ids(200, 2), "his", payload={"scope": "u"})
    await do(app, claim("hers", 200))
    await do(app, claim("his", 200, tenant="u"))
    for tenant, own in (("t", ["c"]), ("u", ["c"]), ("v", [])):
        name = f"of-{tenant}"
        response = await complete(app, ids(300, 3), name, payload={"scope": tenant})
        assert response.status_code == 503
        refused = (await record_of(app, name))["receipt"]["refused"]
        assert (refused["own"], refused["others"]) == (own, 2 - len(own))
    assert len((await do(app, ListClaims("t"))).claims) == 1
    assert len((await do(app, ListClaims())).claims) == 2
    problem = (await do(app, GetClaim("v", "c"))).problem
    assert problem is not None and problem.code == "unknown_claim"


async def test_a_stream_that_outgrows_its_room_ends_with_the_named_error(
    open_app: OpenApp,
) -> None:
    """The error comes beside a claim and another stream; that one continues to its end."""
    app = open_app()
    await complete(app, ids(200, 1), "plan")
    await do(app, claim("plan", 200))

    async def stream(name: str, seed: int) -> list[Any]:
        response = await complete(app, ids(150, seed), name, max_tokens=120, stream=True)
        assert response.status_code == 200
        return [
            json.loads(line[6:]) for line in response.text.split("\n\n")[:-1] if "DONE" not in line
        ]

    ends = await asyncio.gather(stream("one", 2), stream("two", 3))
    broken = [events[-1]["error"] for events in ends if "error" in events[-1]]
    assert [error["code"] for error in broken] == ["refused_by_claim"]
    assert "outgrew" in broken[0]["message"]
    finished = [
        events[-1]["choices"][0]["finish_reason"] for events in ends if "choices" in events[-1]
    ]
    assert finished == ["length"]
    receipts = [(await record_of(app, name))["receipt"] for name in ("one", "two")]
    assert sorted(receipt["refused"] is not None for receipt in receipts) == [False, True]


async def test_a_stream_reaches_its_reader_before_it_outgrows_its_room(open_app: OpenApp) -> None:
    """The text comes first over a real connection, then the error event, and the connection
    ends."""
    app = open_app()
    await complete(app, ids(200, 1), "plan")
    await do(app, claim("plan", 200))
    bodies = [
        {
            "prompt": ids(150, seed),
            "max_tokens": 120,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        for seed in (2, 3)
    ]
    async with served(app) as client:

        async def read(body: dict[str, Any]) -> list[str]:
            async with client.stream("POST", "/v1/completions", json=body) as response:
                return [line async for line in response.aiter_lines() if line]

        ends = await asyncio.gather(*map(read, bodies))
    (broken,) = [lines for lines in ends if lines[-1] != "data: [DONE]"]
    assert len(broken) > 2
    assert json.loads(broken[-1][6:])["error"]["code"] == "refused_by_claim"


async def test_a_forget_beats_a_claim(open_app: OpenApp) -> None:
    """The claim is harmed, and says why; nothing stays pending for its sake."""
    app = open_app()
    spans = [{"span": "head", "start": 0, "end": 100}, {"span": "secret", "start": 100, "end": 300}]
    await complete(app, ids(300, 1), "plan", payload={"spans": spans})
    await do(app, claim("plan", 300))
    spans[1] = {"span": "new", "start": 100, "end": 330}
    prompt = [*ids(300, 1)[:100], *ids(230, 2)]
    response = await complete(app, prompt, "after", payload={"spans": spans, "forget": ["secret"]})
    assert response.status_code == 200
    receipt = (await record_of(app, "after"))["receipt"]
    assert receipt["forgot"]["overwritten"] >= 200 and receipt["forgot"]["pending"] == 0
    (found,) = (await do(app, GetClaim("t", "c"))).claims
    assert (found.state, found.cause) == (ClaimState.HARMED, "forgotten")
    kinds = [event["event"] for event in (await do(app, GetClaimEvents())).events]
    assert kinds.count("lost") == 1


async def test_write_no_admit_keeps_the_sessions_requests_to_themselves(open_app: OpenApp) -> None:
    """They are served as ever, and leave neither KV nor a turn; others do."""
    app = open_app()
    await complete(app, ids(100, 1), "plan")
    await do(app, claim("plan", 100, kind=ClaimKind.SOFT, write_no_admit=True))
    private = [*ids(100, 1), *ids(60, 7)]
    for name in ("first", "second"):
        response = await complete(app, private, name)
        assert response.status_code == 200
        assert response.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 100
        assert (await record_of(app, name))["receipt"]["turn"] == ""
    await do(app, ReleaseClaim("t", "c"))
    for name, cached in (("third", 100), ("fourth", 159)):
        answer = (await complete(app, private, name)).json()
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
    assert (await record_of(app, "fourth"))["receipt"]["turn"] == "fourth"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", None),
        (b"{", None),
        (b"[1]", None),
        (b"[" * 50_000, None),
        (b'{"command": "steal"}', "command"),
        (b'{"command": "get", "tenant": "t"}', "claim"),
        (b'{"command": "list", "limit": 0}', "limit"),
        (b'{"command": "events", "after": -1}', "after"),
        (b'{"command": "get", "tenant": "\xff", "claim": "c"}', None),
    ],
)
async def test_malformed_commands_are_400_and_name_the_field(
    open_app: OpenApp, body: bytes, param: str | None
) -> None:
    """They have OpenAI's shape."""
    response = await post(open_app(), body)
    assert response.status_code == 400
    assert error_of(response)["type"] == "invalid_request_error"
    assert error_of(response)["param"] == param


@pytest.mark.parametrize(
    ("terms", "param"),
    [
        ({"ttl_s": 0}, "claim.ttl_s"),
        ({"ttl_s": 3_155_760_000}, "claim.ttl_s"),
        ({"priority": 101}, "claim.priority"),
        ({"revision": 0}, "claim.revision"),
        ({"id": "a b"}, "claim.id"),
        ({"id": ""}, "claim.id"),
        ({"reason": "x" * 300}, "claim.reason"),
        ({"predicate": {"source": "p", "start": 5, "end": 5}}, "claim.predicate.end"),
        ({"predicate": {"source": "p", "start": -1, "end": 5}}, "claim.predicate.start"),
        ({"predicate": {"source": "p", "start": 0, "end": 5, "share": 0}}, "claim.predicate.share"),
        ({"kind": "weird"}, "claim.kind"),
    ],
)
async def test_impossible_claims_name_what_has_to_change(
    open_app: OpenApp, terms: dict[str, Any], param: str
) -> None:
    """They do so before anything of them is kept."""
    app = open_app()
    document = {
        "id": "c",
        "tenant": "t",
        "session": "s",
        "kind": "hard",
        "predicate": {"source": "p", "start": 0, "end": 5},
    }
    body = json.dumps({"command": "submit", "claim": document | terms}).encode()
    response = await post(app, body)
    assert response.status_code == 400
    assert error_of(response)["param"] == param
    assert (await do(app, GetClaimEvents())).seq <= 2


async def test_what_the_book_refuses_is_said_in_the_reply(open_app: OpenApp) -> None:
    """Unknown session, past the end, older revision, limits: by code and field."""
    app = open_app(claims=1, share=0.3)
    await complete(app, ids(300, 1), "plan")
    for command, code, field in (
        (claim("never", 10), "invalid_claim", "predicate.source"),
        (claim("plan", 10, session="never"), "invalid_claim", "predicate.source"),
        (claim("plan", 10, tenant="u"), "invalid_claim", "predicate.source"),
        (claim("plan", 5000), "invalid_claim", "predicate.end"),
        (claim("plan", 200), "claim_limit", "share"),
        (claim("plan", 100, revision=3), None, ""),
        (claim("plan", 100, revision=2), "stale_revision", "revision"),
        (claim("plan", 10, id="d"), "claim_limit", "claims"),
    ):
        problem = (await do(app, command)).problem
        found = (None, "") if problem is None else (problem.code, problem.field)
        assert found == (code, field)


async def test_a_command_has_a_size(open_app: OpenApp) -> None:
    """A larger one is not read to its end."""
    response = await post(open_app(), b" " * (MAX_COMMAND_BYTES + 1))
    assert response.status_code == 413
    response = await post(open_app(), b" " * MAX_COMMAND_BYTES)
    assert response.status_code == 400


async def test_with_a_secret_commands_must_be_signed(open_app: OpenApp) -> None:
    """Unsigned, or signed for another body, they are not even read."""
    app = open_app(secret="k")
    body = msgspec.json.encode(ListClaims("t"))
    for headers in ({}, {SIGNATURE_HEADER: "x"}, {SIGNATURE_HEADER: sign_bytes(b"other", "k")}):
        response = await post(app, body, **headers)
        assert response.status_code == 403
        assert error_of(response)["code"] == "invalid_signature"
    response = await post(app, b"{", **{SIGNATURE_HEADER: "x"})
    assert response.status_code == 403
    response = await post(app, body, **{SIGNATURE_HEADER: sign_bytes(body, "k")})
    assert response.status_code == 200


async def test_the_handshake_says_that_claims_are_taken(open_app: OpenApp) -> None:
    """It says so by action and version."""
    async with client_of(open_app()) as client:
        capability = (await client.get("/leyline/capability")).json()
        assert "leyline.claim@1.0" in capability["actions"]
        assert (await client.get(CLAIMS_PATH)).status_code == 405


async def test_requests_that_retry_while_a_claim_is_deleted_are_served_at_last(
    open_app: OpenApp,
) -> None:
    """Nothing hangs, nothing leaks: each ends with 503 or an answer."""
    app = open_app()
    await complete(app, ids(300, 1), "plan")
    await do(app, claim("plan", 300))
    refused = 0

    async def retry(number: int) -> None:
        nonlocal refused
        for attempt in range(1000):
            response = await complete(app, ids(350, number), f"r{number}.{attempt}")
            if response.status_code == 200:
                return
            assert error_of(response)["code"] == "refused_by_claim"
            refused += 1
            await asyncio.sleep(0.005)
        raise AssertionError("never served")

    retrying = [asyncio.create_task(retry(number)) for number in range(2, 6)]
    await until(lambda: refused > 8)
    await do(app, ReleaseClaim("t", "c"))
    await asyncio.gather(*retrying)


@pytest.mark.parametrize(
    "limits", [{"shares": 1}, {"share": "much"}, {"share": 1.5}, {"claims": -1}, {"claims": 0.5}]
)
def test_limits_that_cannot_be_are_refused_at_the_start(limits: dict[str, Any]) -> None:
    """They are refused before the model is loaded; the limit is named."""
    with pytest.raises(ValueError, match=next(iter(limits))):
        create_engine_app(model="/nowhere", claim_limits=limits)


def test_limits_have_defaults() -> None:
    """Unstated limits keep their defaults."""
    assert read_limits({}) == Limits()
    assert read_limits({"share": 0.25, "claims": 7}) == Limits(share=0.25, claims=7)
