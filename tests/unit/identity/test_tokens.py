"""Tokens of an identity provider: what lets a caller in, and what doesn't."""

from __future__ import annotations

import asyncio
import json
import time
from base64 import urlsafe_b64encode
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from email.utils import formatdate
from typing import Any

import httpx
import jwt
import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from pydantic import ValidationError
from support.clock import Clock
from support.fake_engine import MODEL, FakeEngine, proxy_before
from support.provider import AUDIENCE, Provider, provider
from support.redis_server import free_port
from support.waiting import until

from leyline_proxy.identity.errors import KeysGoneError, TokenRefusedError, UnknownTenantError
from leyline_proxy.identity.key_set import HttpKeys, KeySet, KeySetError, PublicKeys, read_keys
from leyline_proxy.identity.tokens import MAX_TOKEN, Tokens, looks_like_token
from leyline_proxy.settings import Settings

CHAT = "/v1/chat/completions"
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "Hi."}]}


@pytest.fixture(scope="module")
def idp() -> Iterator[Provider]:
    """One provider for the module."""
    with provider() as running:
        yield running


@pytest.fixture(autouse=True)
def healthy(idp: Provider) -> None:
    """The provider as it was at first."""
    idp.keys = {"k1": idp.keys["k1"]}
    idp.status, idp.body, idp.name, idp.date, idp.looks = 200, None, None, None, 0


def tokens(idp: Provider, **changes: Any) -> tuple[Tokens, Counter[str]]:
    """The tokens of a proxy, and the counts of their results."""
    counts: Counter[str] = Counter()
    clock = changes.pop("clock", time.monotonic)
    max_age_s = changes.pop("max_age_s", 3600)
    keys = KeySet(HttpKeys(idp.origin, None), refresh_s=300, max_age_s=max_age_s, clock=clock)
    given: dict[str, Any] = {
        "issuer": idp.origin,
        "audiences": [AUDIENCE, "other"],
        "algorithms": ["RS256", "ES256", "EdDSA"],
        "leeway_s": 5.0,
        "claim": "org.tenant",
        "tenants": {},
        "counted": lambda result: counts.update([result.value]),
    }
    return Tokens(keys, **{**given, **changes}), counts


def exists(name: str) -> bool:
    """Return True for the tenants of these tests."""
    return name in {"red", "blue"}


def of(name: object) -> dict[str, Any]:
    """The claim with a tenant."""
    return {"org": {"tenant": name}}


@pytest.mark.parametrize("algorithm", ["RS256", "ES256", "EdDSA"])
async def test_a_good_token_names_its_tenant(idp: Provider, algorithm: str) -> None:
    """With a key of each kind; the second time nothing is looked at."""
    idp.add("k2", algorithm)
    checked, counts = tokens(idp)
    token = idp.token("k2", **of("red"))
    assert looks_like_token(token)
    assert [await checked.tenant(token, exists) for _ in range(3)] == ["red"] * 3
    assert counts == {"verified": 1} and idp.looks == 1


def forged(idp: Provider) -> dict[str, Callable[[], str]]:
    """Tokens that aren't good, by their result."""
    now = time.time()

    def parts(header: dict[str, Any]) -> str:
        claims = {"iss": idp.origin, "aud": AUDIENCE, "exp": now + 60, **of("red")}
        texts = (json.dumps(each).encode() for each in (header, claims))
        return ".".join(urlsafe_b64encode(each).rstrip(b"=").decode() for each in texts)

    public = idp.keys["k1"][1].public_key()
    pem = public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)

    def by_public_key() -> str:
        """Signed with the public key as if it were a shared secret."""
        signed = parts({"alg": "HS256", "kid": "k1", "typ": "JWT"})
        algorithm = jwt.get_algorithm_by_name("HS256")
        mac = algorithm.sign(signed.encode(), pem)
        return f"{signed}.{urlsafe_b64encode(mac).rstrip(b'=').decode()}"

    good = idp.token(**of("red"))
    head, _, signature = good.split(".")
    other = json.dumps({"iss": idp.origin, "aud": AUDIENCE, "exp": now + 60, **of("blue")})
    swapped = urlsafe_b64encode(other.encode()).rstrip(b"=").decode()
    stranger = Provider()
    return {
        "algorithm none": lambda: parts({"alg": "none", "kid": "k1"}) + ".",
        "algorithm hs": by_public_key,
        "signature": lambda: f"{head}.{swapped}.{signature}",
        "signature other": lambda: idp.token(key=stranger.add("k1"), **of("red")),
        "unknown_key": lambda: idp.token("k9", key=stranger.add("k9"), **of("red")),
        "expired": lambda: idp.token(exp=now - 600, **of("red")),
        "not_yet nbf": lambda: idp.token(nbf=now + 600, **of("red")),
        "not_yet iat": lambda: idp.token(iat=now + 600, exp=now + 900, **of("red")),
        "issuer": lambda: idp.token(iss=idp.origin + "/", **of("red")),
        "audience": lambda: idp.token(aud="another", **of("red")),
        "malformed exp": lambda: idp.token(exp=None, **of("red")),
        "malformed aud": lambda: idp.token(aud=None, **of("red")),
        "malformed long": lambda: f"{head}.{'A' * MAX_TOKEN}.{signature}",
        "malformed junk": lambda: "eyJ.eyJ.eyJ",
        "tenant unknown": lambda: idp.token(**of("green")),
        "tenant none": idp.token,
        "tenant number": lambda: idp.token(**of(7)),
        "tenant both": lambda: idp.token(**of(["red", "blue"])),
    }


FORGED = (
    *("algorithm none", "algorithm hs", "signature", "signature other", "unknown_key", "expired"),
    *("not_yet nbf", "not_yet iat", "issuer", "audience", "malformed exp", "malformed aud"),
    *("malformed long", "malformed junk", "tenant unknown", "tenant none", "tenant number"),
    "tenant both",
)


@pytest.mark.parametrize("name", FORGED)
async def test_what_isnt_good_is_refused_by_name(idp: Provider, name: str) -> None:
    """Each gets its own result, its own words, and none of the token in them."""
    token = forged(idp)[name]()
    checked, counts = tokens(idp)
    with pytest.raises((TokenRefusedError, UnknownTenantError)) as caught:
        await checked.tenant(token, exists)
    assert counts == {name.split(" ", maxsplit=1)[0]: 1}
    assert not any(part and part in caught.value.message for part in token.split("."))
    if name.startswith("not_yet"):
        assert "another 600 s" in caught.value.message or "another 599 s" in caught.value.message
    assert await checked.tenant(idp.token(**of("red")), exists) == "red"


@pytest.mark.parametrize(
    ("value", "tenant"), [("team-1", "red"), (["x", "team-1"], "red"), (["team-2", 5], "blue")]
)
async def test_values_are_mapped_to_tenants(idp: Provider, value: object, tenant: str) -> None:
    """A mapping decides alone: then a tenant's own name is no value."""
    checked, _ = tokens(idp, tenants={"team-1": "red", "team-2": "blue"})
    assert checked.tenants == {"red", "blue"}
    assert await checked.tenant(idp.token(**of(value)), exists) == tenant
    with pytest.raises(UnknownTenantError, match="no tenant of this proxy"):
        await checked.tenant(idp.token(**of("red")), exists)


async def test_keys_may_change(idp: Provider) -> None:
    """A new key works at once, one that isn't published any more from the next look on, and the
    tokens that were known by it as well."""
    clock = Clock(1000.0)
    checked, counts = tokens(idp, clock=clock)
    old = idp.token(**of("red"))
    assert await checked.tenant(old, exists) == "red"
    kept = idp.keys.pop("k1")
    idp.add("k2")
    clock.now += 11
    assert await checked.tenant(idp.token("k2", **of("blue")), exists) == "blue"
    with pytest.raises(TokenRefusedError):
        await checked.tenant(old, exists)
    assert counts["unknown_key"] == 1
    idp.keys["k1"] = kept


async def test_made_up_keys_cost_the_provider_little(idp: Provider) -> None:
    """However many unknown keys come, the provider is asked once in ten seconds."""
    clock = Clock(1000.0)
    checked, _ = tokens(idp, clock=clock)
    stranger = Provider().add("x")
    for number in range(50):
        with pytest.raises(TokenRefusedError):
            await checked.tenant(idp.token(f"x{number}", key=stranger, **of("red")), exists)
        clock.now += 0.4
    assert idp.looks <= 3


async def test_an_outage_is_survived_for_a_time(idp: Provider) -> None:
    """The last good keys serve until they are too old; then tokens are refused, with 503."""
    clock = Clock(1000.0)
    checked, counts = tokens(idp, clock=clock, max_age_s=600)
    known = idp.token(**of("red"))
    assert await checked.tenant(known, exists) == "red"
    idp.status = 500
    clock.now += 300
    await checked.keys.look()
    assert checked.keys.problem is not None and "500" in checked.keys.problem
    assert await checked.tenant(idp.token(**of("blue")), exists) == "blue"
    clock.now += 301
    for token in (known, idp.token(**of("blue"))):
        with pytest.raises(KeysGoneError) as caught:
            await checked.tenant(token, exists)
        assert (caught.value.status, caught.value.code) == (503, "identity_unavailable")
    assert counts["keys_gone"] == 2
    idp.status = 200
    clock.now += 11
    assert await checked.tenant(known, exists) == "red"


async def test_good_tokens_are_remembered_within_bounds(
    idp: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The least recently used give way, and an expired one isn't good because it was."""
    monkeypatch.setattr("leyline_proxy.identity.tokens._MAX_KNOWN", 3)
    clock = Clock(time.time())
    checked, counts = tokens(idp, now=clock)
    many = [idp.token(sub=str(number), **of("red")) for number in range(5)]
    for token in many:
        await checked.tenant(token, exists)
    assert len(checked._known) == 3
    assert await checked.tenant(many[4], exists) == "red" and counts["verified"] == 5
    clock.now += 400  # the library has a clock of its own, so this one is checked again
    assert await checked.tenant(many[4], exists) == "red" and counts["verified"] == 6


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ({"body": b"no json"}, "gives no JSON"),
        ({"body": b"[]"}, "gives no object"),
        ({"body": b'{"keys":[]}'}, "none of the keys"),
        ({"body": b'{"keys":[{"kty":"oct","k":"c2VjcmV0"}]}'}, "none of the keys"),
        ({"body": b" " * 300_000}, "more than"),
        ({"body": json.dumps({"keys": [{}] * 65}).encode()}, "at most 64"),
        ({"status": 302}, "answers 302"),
        ({"name": "https://another.example"}, "another name than oidc_issuer"),
    ],
)
async def test_bad_keys_are_named(idp: Provider, fault: dict[str, Any], told: str) -> None:
    """Whatever the provider gives, the problem says what is wrong with it."""
    for name, value in fault.items():
        setattr(idp, name, value)
    with pytest.raises(KeySetError, match=told):
        await HttpKeys(idp.origin, None)()


async def test_a_provider_that_is_gone_is_named() -> None:
    """A refused connection is a problem, no error of another kind."""
    with pytest.raises(KeySetError, match="can't be reached"):
        await HttpKeys("http://127.0.0.1:9", None)()


async def test_clocks_that_differ_are_told_of(idp: Provider) -> None:
    """The refusal of an expired token says by how much the provider's clock differs."""
    idp.date = formatdate(time.time() + 600, usegmt=True)
    checked, _ = tokens(idp)
    with pytest.raises(TokenRefusedError, match=r"the provider's clock is \+(599|600) s"):
        await checked.tenant(idp.token(exp=time.time() - 60, **of("red")), exists)


async def test_callers_share_a_look() -> None:
    """Many callers at once wait for one look, and one that leaves doesn't end it."""
    looks, go = 0, asyncio.Event()

    async def fetch() -> PublicKeys:
        nonlocal looks
        looks += 1
        await go.wait()
        return PublicKeys({})

    keys = KeySet(fetch, refresh_s=300, max_age_s=60)
    callers = [asyncio.create_task(keys.find("x")) for _ in range(5)]
    await asyncio.sleep(0.01)
    callers[0].cancel()
    go.set()
    assert await asyncio.gather(*callers[1:]) == [None] * 4
    assert looks == 1


def test_symmetric_keys_are_no_public_keys(idp: Provider) -> None:
    """A shared secret in the document is ignored beside a good key."""
    document = idp.document()
    secret = {"kty": "oct", "k": "c2VjcmV0LXNlY3JldA", "kid": "s", "alg": "HS256"}
    found = read_keys({"keys": [secret, *document["keys"], {"kty": "RSA", "kid": "broken"}]})
    assert set(found) == {"k1"}


def test_keys_with_odd_names_are_passed_over(idp: Provider) -> None:
    """A name that is no text harms no other key."""
    (good,) = idp.document()["keys"]
    odd = [{**good, "kid": name} for name in (["x"], {"a": 1}, 7)]
    assert set(read_keys({"keys": [*odd, good]})) == {"k1"}


async def test_a_look_that_fails_as_nobody_foresaw_is_a_failed_look() -> None:
    """The next looks take place, the problem is named, and keys are used until they are too old."""
    clock, looks = Clock(), Counter[bool]()

    async def fetch() -> PublicKeys:
        if sum(looks.values()) == 1:
            raise RecursionError
        return PublicKeys({})

    keys = KeySet(
        fetch, refresh_s=300, max_age_s=60, fetched=lambda good: looks.update([good]), clock=clock
    )
    await keys.look()
    await keys.look()
    assert (keys.problem, keys.usable) == ("they can't be read (RecursionError)", True)
    await keys.look()
    assert keys.problem is None
    assert looks == {True: 2, False: 1}


@asynccontextmanager
async def proxy(idp: Provider, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A proxy for two tenants, one of which has an API key as well."""
    given = {
        "oidc_issuer": idp.origin,
        "oidc_audience": [AUDIENCE],
        "tenants": {"red": {}, "blue": {"api_keys": ["key-of-blue"]}},
        **settings,
    }
    async with proxy_before(FakeEngine(), **given) as http:
        yield http


async def test_every_route_takes_tokens(idp: Provider) -> None:
    """Turns of each API, models, sessions and claims; API keys still work."""
    red = {"authorization": f"Bearer {idp.token(tenant='red')}"}
    async with proxy(idp) as http:
        assert (await http.post(CHAT, json=BODY, headers=red)).status_code == 200
        named = {**red, "x-leyline-session": "s"}
        assert (await http.post(CHAT, json=BODY, headers=named)).status_code == 200
        messages = {**BODY, "max_tokens": 5}
        key = {"x-api-key": idp.token(tenant="red")}
        assert (await http.post("/v1/messages", json=messages, headers=key)).status_code == 200
        for path in ("/v1/models", "/v1/leyline/sessions/s"):
            assert (await http.get(path, headers=red)).status_code == 200, path
        blue = {"authorization": "Bearer key-of-blue"}
        assert (await http.get("/v1/leyline/sessions/s", headers=blue)).status_code == 404
        assert (await http.post(CHAT, json=BODY, headers=blue)).status_code == 200
        text = (await http.get("/metrics")).text
        assert 'leyline_identity_tokens_total{result="verified"} 2.0' in text


async def test_readiness_knows_whether_tokens_can_be_checked(idp: Provider) -> None:
    """Not ready if nobody can get in; keys that were read, or another way in, make it ready."""
    away = {"oidc_issuer": f"http://127.0.0.1:{free_port()}"}
    alone = {"tenants": {"red": {}}}
    found = []
    for settings in ({**away, **alone}, away, alone):
        async with proxy(idp, **settings) as http:
            for _ in range(200):
                answer = await http.get("/readyz")
                if answer.json()["identity"]["problem"] != "they were not read yet":
                    break
                await asyncio.sleep(0.02)
            found.append((answer.status_code, answer.json()["identity"]["usable"]))
    assert found == [(503, False), (200, False), (200, True)]


async def test_errors_have_the_apis_shape(idp: Provider) -> None:
    """401 with a challenge, 403 with the fix, in OpenAI's and in Anthropic's shape."""
    async with proxy(idp) as http:
        for path, kind in ((CHAT, "error"), ("/v1/messages", "type")):
            expired = {"authorization": f"Bearer {idp.token(tenant='red', exp=5)}"}
            answer = await http.post(path, json=BODY, headers=expired)
            assert answer.status_code == 401 and kind in answer.json()
            assert "expired" in answer.json()["error"]["message"]
            assert answer.headers["www-authenticate"] == 'Bearer error="invalid_token"'
            stranger = {"authorization": f"Bearer {idp.token(tenant='green')}"}
            answer = await http.post(path, json=BODY, headers=stranger)
            assert answer.status_code == 403
            assert "oidc_tenants" in answer.json()["error"]["message"]
        assert (await http.post(CHAT, json=BODY)).status_code == 401


async def test_a_provider_closes_the_proxy(idp: Provider) -> None:
    """Without any API key, who brings no token is nobody, and not the default tenant."""
    async with proxy(idp, tenants={"red": {}}) as http:
        assert (await http.post(CHAT, json=BODY)).status_code == 401
        red = {"authorization": f"Bearer {idp.token(tenant='red')}"}
        assert (await http.post(CHAT, json=BODY, headers=red)).status_code == 200


async def test_a_provider_that_comes_late_is_found(idp: Provider) -> None:
    """The proxy starts without it, says so, and API keys work meanwhile."""
    idp.status = 503
    red = {"authorization": f"Bearer {idp.token(tenant='red')}"}
    async with proxy(idp) as http:
        answer = await http.post(CHAT, json=BODY, headers=red)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "identity_unavailable")
        assert int(answer.headers["retry-after"]) > 0
        blue = {"authorization": "Bearer key-of-blue"}
        assert (await http.post(CHAT, json=BODY, headers=blue)).status_code == 200


async def test_no_token_reaches_the_log(idp: Provider, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither good tokens nor bad ones are written down."""
    many = [idp.token(tenant="red"), idp.token(tenant="green"), idp.token(exp=5, tenant="red")]
    async with proxy(idp) as http:
        for token in many:
            await http.post(CHAT, json=BODY, headers={"authorization": f"Bearer {token}"})
        metrics = (await http.get("/metrics")).text
    out = capsys.readouterr()
    for token in many:
        for part in token.split(".")[1:]:
            assert part not in out.out + out.err + metrics


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"oidc_issuer": "https://a.example"}, "oidc_audience"),
        ({"oidc_issuer": "http://a.example", "oidc_audience": "x"}, "https://"),
        ({"oidc_audience": "x"}, "need oidc_issuer"),
        (
            {"oidc_issuer": "https://a.example", "oidc_audience": "x", "oidc_algorithms": "HS256"},
            "RS256",
        ),
        (
            {
                "oidc_issuer": "https://a.example",
                "oidc_audience": "x",
                "oidc_tenants": {"a": "b c"},
            },
            "tenant's name",
        ),
    ],
)
def test_wrong_settings_are_named(given: dict[str, Any], told: str) -> None:
    """Each error names what to change."""
    with pytest.raises(ValidationError, match=told):
        Settings.model_validate(given)


async def test_keys_are_read_ahead(idp: Provider) -> None:
    """The proxy looks at the keys when it starts, so that the first token waits for nothing."""
    async with proxy(idp):
        await until(lambda: idp.looks == 1)
