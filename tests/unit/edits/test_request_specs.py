"""Policies that a request brings: where they are read, what they may hold, how long they stay."""

from __future__ import annotations

import threading

import pytest
from support.fake_engine import MODEL, FakeEngine, proxy_before

from leyline_policies import Policy
from leyline_policies.allowance import Allowance
from leyline_policies.builtin import linear_pattern
from leyline_policies.builtin.keep_all import KeepAll
from leyline_policies.compose import Protected
from leyline_policies.context import Context
from leyline_proxy.edits import rules
from leyline_proxy.edits.rules import PolicyCatalog
from leyline_proxy.errors import BadRequestError
from leyline_proxy.model.undeclared import UndeclaredRules
from leyline_proxy.tenants import Tenant

CHAT = "/v1/chat/completions"
RED, BLUE = (
    Tenant(name, (), UndeclaredRules(), allow_request_policy=True) for name in ("red", "blue")
)


async def test_a_spec_is_read_once_and_off_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that compiles isn't the loop's, nor does the same spec compile again."""
    threads: list[threading.Thread] = []
    read = rules.load_pipeline

    def noted(*args: object, **more: object) -> tuple[Policy, ...]:
        threads.append(threading.current_thread())
        return read(*args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(rules, "load_pipeline", noted)
    engine = FakeEngine()
    body = {"model": MODEL, "messages": [{"role": "user", "content": "an sk-abc"}]}
    async with proxy_before(engine) as client:
        for _ in range(3):
            options = {"leyline": {"policy": r"redact:pattern='\bsk-\w+'"}}
            assert (await client.post(CHAT, json=body | options)).status_code == 200
    assert engine.sent["messages"][0]["content"] == "an [redacted]"
    assert len(threads) == 1 and threads[0] is not threading.main_thread()


@pytest.mark.parametrize("api", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
async def test_an_unknown_construct_is_refused_by_name(api: str) -> None:
    """With a 400 that names field, setting and construct, on every path that takes policies."""
    engine = FakeEngine()
    asked = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
        "/v1/completions": {"prompt": "x"},
        "/v1/responses": {"input": "x"},
    }[api]
    options = {"leyline": {"policy": "redact:pattern='(?<=x)secret'"}}
    async with proxy_before(engine) as client:
        refused = await client.post(api, json={"model": MODEL, **asked, **options})
    assert refused.status_code == 400, refused.text
    error = refused.json()["error"]
    assert error["param"] == "leyline.policy"
    assert "redact: pattern: " in error["message"] and "a lookbehind" in error["message"]
    assert engine.bodies == []


async def test_a_long_spec_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its length is bounded before anything looks at it."""
    monkeypatch.delattr(rules, "load_pipeline")
    with pytest.raises(BadRequestError, match="longer than 4096"):
        await PolicyCatalog().load(RED, "keep_all" + " " * 5000)


async def test_no_tenant_drops_the_policies_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many specs one brings, the other's are the same objects as before."""
    monkeypatch.setattr(rules, "_CACHED_SPECS", 6)
    monkeypatch.setattr(rules, "_CACHED_OF_ONE", 6)
    catalog = PolicyCatalog()
    kept = [await catalog.load(BLUE, f"sliding_window:max_messages={n}") for n in (9, 10)]
    for number in range(10, 40):
        await catalog.load(RED, f"sliding_window:max_messages={number}")
    again = [await catalog.load(BLUE, f"sliding_window:max_messages={n}") for n in (9, 10)]
    assert all(new is old for new, old in zip(again, kept, strict=True))
    assert {name: len(held) for name, held in catalog._loaded.items()} == {"blue": 2, "red": 4}


@pytest.mark.parametrize(
    "spec",
    [
        "keep_all:protect_first=1000000000",
        "keep_all:protect_last=1000000000",
        "truncate_older_than:n=1000000000,max_chars=1000000000",
        "loop_guard:repeats=1000000000,max_period=16",
        "sliding_window:max_messages=1000000000,keep_first=999999999",
    ],
)
async def test_large_numbers_cost_nothing(spec: str) -> None:
    """A number of messages means at most those that there are."""
    (policy,) = await PolicyCatalog().load(RED, spec)
    messages = [{"role": "user", "content": f"{n}"} for n in range(9)]
    assert policy.transform([*messages], 1, Context(turn=1)) == messages  # type: ignore[call-arg]


def test_protection_of_more_messages_than_there_are_covers_all() -> None:
    """At either end."""
    messages = [{"role": "user", "content": f"{n}"} for n in range(5)]
    for ends in ({"keep_first": 10**12}, {"keep_last": 10**12}):
        guarded = Protected(KeepAll(), **ends).guarded(messages, Context())
        assert guarded == {*range(5)}


def test_what_is_compiled_for_the_allowance_is_not_compiled_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A request's pattern is read once for its check and its policy."""
    compiled = linear_pattern.linear_pattern
    before = compiled.cache_info().misses
    rules.load_pipeline("redact:pattern=once-only-77", allowance=Allowance())
    assert compiled.cache_info().misses == before + 1


def _nested(depth: int) -> str:
    spec = "truncate_older_than"
    for level in range(depth):
        quote = "'\""[level % 2]
        inner = spec.replace(quote, quote * 2)
        spec = f"tiered:tiers=[{quote}{inner}{quote}],target_tokens=1,at_least=1"
    return spec


async def test_policies_inside_others_do_not_multiply_their_work() -> None:
    """Each level runs what is inside it twice, so there are few; lists and triggers are short."""
    catalog = PolicyCatalog()
    assert await catalog.load(RED, _nested(3))
    many = ";".join(f"tool_{n}" for n in range(65))
    for spec, words in (
        (_nested(4), "nests policies too deep"),
        (_nested(9), "nests policies too deep"),
        (f"cache_ttl_prune:tools=[{many}]", "at most 64 items"),
        (f"keep_all:protect_tools=[{many}]", "at most 64 items"),
        (f"keep_all:when='{' or '.join(['keyword:a'] * 40)}'", "at most 500 characters"),
        (" | ".join(["keep_all"] * 17), "at most 16 policies"),
    ):
        with pytest.raises(BadRequestError, match=words):
            await catalog.load(RED, spec)
