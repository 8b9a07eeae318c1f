"""Attacks on sessions through the whole stack: does anything remember what it should forget?

The oracle is non-interference. Two sessions run the same requests and differ in one secret only.
A request that shows the secret to the model may answer differently in the two; one that must have
forgotten it may not, down to the log probabilities.
"""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from support.stack import embedded_stack

from leyline_lab.stand_ins.random_models import RandomKind, build_random

CHAT = "/v1/chat/completions"
Conversation = list[dict[str, Any]]

SECRETS = ("7391", "2846")
REDACT = r"redact:pattern='key=\d+',replacement='[gone]'"
TRUNCATE = "truncate_older_than:n=1,max_chars=60"
CLOSE = 1e-3
"""Log probabilities nearer than this are equal; what has read another secret is farther apart."""


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A bare HTTP client of a whole stack with two tenants.

    Its model's weights are random, so that whatever it reads shows in its logits: a trained one is
    sure of its answer whether it has read a secret or not.
    """
    folder = build_random(RandomKind.MLA, tmp_path_factory.mktemp("models") / "random")
    options = {"model": str(folder), "pool_tokens": 65_536, "device": "cpu"}
    with (
        embedded_stack(options, api_keys="one:key-one,two:key-two", log_level="error") as origin,
        httpx.Client(
            base_url=origin, timeout=60, headers={"authorization": "Bearer key-one"}
        ) as http,
    ):
        yield http


@pytest.fixture(scope="module")
def model(client: httpx.Client) -> str:
    """The served model."""
    name: str = client.get("/v1/models").json()["data"][0]["id"]
    return name


class World:
    """One session in which the secret has one value."""

    def __init__(self, client: httpx.Client, model: str, session: str, secret: str) -> None:
        self._client, self._model, self._secret = client, model, secret
        self.headers = {"x-leyline-session": session} if session else {}
        self.account: dict[str, Any] = {}

    def ask(self, messages: Conversation, **options: Any) -> list[float]:
        """Log probabilities of the first answer token's likeliest candidates."""
        text = json.dumps(messages).replace("SECRET", f"key={self._secret}")
        headers = options.pop("headers", {}) | self.headers
        max_tokens = options.pop("max_tokens", 1)
        answer = self._client.post(
            CHAT,
            json={
                "model": self._model,
                "messages": json.loads(text),
                "max_tokens": max_tokens,
                "temperature": 0,
                "logprobs": True,
                "top_logprobs": 5,
                "ignore_eos": True,
                "leyline": options,
            },
            headers=headers,
        )
        assert answer.status_code == 200, answer.text
        document = answer.json()
        self.account = document["leyline"]
        tokens = self.account["tokens"]
        assert tokens["prompt"] == tokens["prefix"] + tokens["spliced"] + tokens["prefilled"]
        first = document["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        return sorted(float(item["logprob"]) for item in first)


def worlds(client: httpx.Client, model: str, name: str) -> tuple[World, World]:
    """The same session with one secret and with another."""
    first, second = (World(client, model, f"{name}-{secret}", secret) for secret in SECRETS)
    return first, second


def both(pair: tuple[World, World], messages: Conversation, **options: Any) -> float:
    """Ask both; the largest difference between their log probabilities."""
    first, second = (world.ask(messages, **options) for world in pair)
    return max(abs(a - b) for a, b in zip(first, second, strict=True))


def call(turn: int) -> dict[str, Any]:
    """An assistant message that calls a tool."""
    function = {"name": "shell", "arguments": json.dumps({"command": f"ls {turn}"})}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": f"call_{turn}", "type": "function", "function": function}],
    }


def result(turn: int, text: str) -> dict[str, Any]:
    """A tool's answer."""
    return {"role": "tool", "tool_call_id": f"call_{turn}", "content": text}


def agent(turns: int, task: str, *, leak: str = "the log says SECRET so") -> Conversation:
    """A history in which the first tool result holds the secret between long lines."""
    messages: Conversation = [
        {"role": "system", "content": "You are an agent that looks into folders. " * 3},
        {"role": "user", "content": task},
    ]
    for turn in range(turns):
        lines = " ".join(f"line {turn}.{number} of the listing" for number in range(8))
        text = f"{lines}\n{leak}\n{lines}" if turn == 0 else lines
        messages += [call(turn), result(turn, text)]
    return messages


def test_the_oracle_sees_what_a_splice_remembers(client: httpx.Client, model: str) -> None:
    """Amortised truncation hides the secret from the prompt but not from the KV after it."""
    pair = worlds(client, model, "control")
    assert both(pair, agent(2, "Control.")) > CLOSE
    assert both(pair, agent(3, "Control."), policy=TRUNCATE) > CLOSE
    assert pair[0].account["tokens"]["spliced"] > 0
    fresh = worlds(client, model, "control-fresh")
    assert both(fresh, agent(3, "Control."), policy=TRUNCATE) < CLOSE


@pytest.mark.parametrize("seed", range(8))
def test_a_forgotten_secret_stays_forgotten(client: httpx.Client, model: str, seed: int) -> None:
    """After a forget, no answer knows, whatever is truncated, branched, repeated or asked aside.

    Each walk begins with a secret that only spliced KV remembers, and forgets at least once.
    """
    chance = random.Random(seed)
    pair = worlds(client, model, f"walk-{seed}")
    hidden_by_truncation(pair, f"Walk {seed}.")
    turns, knows = 3, True
    for step in range(7):
        turns = max(1, turns + chance.choice([-1, 0, 1, 1, 1]))  # branch, regenerate, continue
        messages = agent(turns, f"Walk {seed}.")
        if chance.random() < 0.2:
            messages = [*messages, {"role": "user", "content": "Sum it up in a few words."}]
        if chance.random() < 0.15:
            messages = [{"role": "user", "content": "Find a title for this talk."}]
        policy = chance.choice([TRUNCATE, TRUNCATE, f"{REDACT} | {TRUNCATE}", REDACT, "keep_all"])
        if step == 3:
            messages, policy = agent(turns, f"Walk {seed}."), f"{REDACT} | {TRUNCATE}"
        undeclared = chance.choice([{}, {"tool": "amortize", "user": "amortize"}])
        shown = turns == 1 or "truncate" not in policy
        if len(messages) > 1:  # a request aside holds no secret and demands nothing
            knows = "redact" not in policy and (knows or shown)
        difference = both(pair, messages, policy=policy, undeclared=undeclared)
        if not knows:
            assert difference < CLOSE, (policy, turns, pair[0].account)


def hidden_by_truncation(pair: tuple[World, World], task: str) -> None:
    """Two turns after which the prompt shows no secret, but spliced KV has read it."""
    both(pair, agent(2, task))
    assert both(pair, agent(3, task), policy=TRUNCATE) > CLOSE


def test_a_forget_reaches_what_a_truncation_hid(client: httpx.Client, model: str) -> None:
    """Redaction that comes after the truncation finds the readers of what was cut."""
    pair = worlds(client, model, "hidden")
    hidden_by_truncation(pair, "Hidden.")
    assert both(pair, agent(4, "Hidden."), policy=f"{REDACT} | {TRUNCATE}") < CLOSE
    assert both(pair, agent(5, "Hidden."), policy=TRUNCATE) < CLOSE


def test_a_forget_reaches_it_in_any_order_of_policies(client: httpx.Client, model: str) -> None:
    """Redaction binds also if it comes after the policy that hid the secret."""
    pair = worlds(client, model, "order")
    hidden_by_truncation(pair, "Order.")
    assert both(pair, agent(4, "Order."), policy=f"{TRUNCATE} | {REDACT}") < CLOSE


@pytest.mark.parametrize("order", ["{redact} | {drop}", "{drop} | {redact}"])
def test_a_forget_reaches_what_a_policy_drops(client: httpx.Client, model: str, order: str) -> None:
    """A failed call that held a secret is forgotten, not merely dropped."""
    pair = worlds(client, model, f"drop-{order[1]}")
    task = f"Drop {order}."
    leak = "Traceback (most recent call last):\nValueError: SECRET"
    messages = agent(3, task, leak=leak)
    messages[3] = result(0, f"Error: command failed with exit code 1\n{leak}")
    both(pair, messages)
    policy = order.format(redact=REDACT, drop="drop_failed_calls")
    difference = both(pair, [*messages, {"role": "user", "content": "Go on."}], policy=policy)
    assert not re.search(r"call_0", json.dumps(pair[0].account))
    assert difference < CLOSE


def test_a_forget_reaches_what_was_dropped_turns_ago(client: httpx.Client, model: str) -> None:
    """A call dropped by a policy may be declared forgotten after its own turn is no source now."""
    pair = worlds(client, model, "dropped")
    leak = "Error: command failed with exit code 1\nTraceback (most recent call last):\nSECRET"

    def turn(count: int) -> Conversation:
        messages = agent(count, "Dropped.")
        messages[3] = result(0, leak)
        return messages

    both(pair, turn(2))
    for count in range(3, 8):
        assert both(pair, turn(count), policy="drop_failed_calls") > CLOSE
    edits = [{"message": index, "drop": True, "mode": "forget"} for index in (2, 3)]
    assert both(pair, turn(8), policy="drop_failed_calls", edits=edits) < CLOSE


def test_a_redacted_answer_is_forgotten(client: httpx.Client, model: str) -> None:
    """Text that the model itself may have written is not read again either."""
    pair = worlds(client, model, "answer")
    messages = agent(2, "Answer.", leak="nothing here")
    said = [*messages, {"role": "assistant", "content": "It says SECRET and no more than that."}]
    more = [*said, {"role": "user", "content": "Go on, and look into the next folder as well."}]
    assert both(pair, more) > CLOSE
    assert both(pair, more, policy=REDACT) < CLOSE


def test_a_forget_binds_requests_that_are_under_way(client: httpx.Client, model: str) -> None:
    """A turn that began before a forget and ended after it is no source for later turns."""
    pair = worlds(client, model, "flight")
    hidden_by_truncation(pair, "Flight.")
    for world in pair:
        with ThreadPoolExecutor(1) as pool:
            slow = pool.submit(world.ask, agent(4, "Flight."), policy=TRUNCATE, max_tokens=400)
            time.sleep(0.25)
            assert not slow.done()
            world.ask(agent(4, "Flight."), policy=f"{REDACT} | {TRUNCATE}")
            assert not slow.done()
            slow.result()
    assert both(pair, agent(5, "Flight."), policy=TRUNCATE) < CLOSE


def test_tenants_share_no_session(client: httpx.Client, model: str) -> None:
    """Another tenant's session of the same name is neither seen nor drawn on."""
    other = {"authorization": "Bearer key-two"}
    ours = worlds(client, model, "tenants")
    hidden_by_truncation(ours, "Tenants.")
    assert both(ours, agent(3, "Tenants."), policy=TRUNCATE, headers=other) < CLOSE
    assert ours[0].account["turn_index"] == 0
    assert ours[0].account["tokens"]["spliced"] == 0
    found = client.get("/v1/leyline/sessions", headers=other).json()["sessions"]
    assert {item["turns"] for item in found} == {1}


def test_a_shared_cache_key_joins_no_conversations(client: httpx.Client, model: str) -> None:
    """Two users with one prompt_cache_key and one opening stay two sessions, turn after turn."""
    sessions: dict[str, set[str]] = {"left": set(), "right": set()}
    for turn in (0, 1, 2, 3):
        for user, seen in sessions.items():
            messages = agent(turn, "Shared.", leak=f"{user} has its own words here")
            body = {"model": model, "messages": messages, "max_tokens": 1}
            body |= {"prompt_cache_key": "agents", "leyline": {"undeclared": {"tool": "amortize"}}}
            account = client.post(CHAT, json=body).json()["leyline"]
            if turn > 0:  # before the first tool result the two are one and the same
                seen.add(account["session"])
            assert account["tokens"]["spliced"] == 0
    assert not sessions["left"] & sessions["right"]
    assert all(len(seen) == 1 for seen in sessions.values())


def owners(client: httpx.Client, model: str) -> tuple[World, World]:
    """Two tenants, in which the same conversation has no name and the secret another value."""
    first, second = (World(client, model, "", secret) for secret in SECRETS)
    second.headers = {"authorization": "Bearer key-two"}
    return first, second


@pytest.mark.parametrize("how", ["undeclared", "declared", "policy"])
def test_no_one_finds_what_another_list_shows(client: httpx.Client, model: str, how: str) -> None:
    """A client that sends, without a name, the messages that a conversation shows by now gets no KV
    that has read text cut from it before, by anyone; where its own list shows it, it does."""
    pair, task = owners(client, model), f"Nameless {how}."
    shown = agent(3, task)
    length = len(shown[3]["content"].replace("SECRET", f"key={SECRETS[0]}"))
    shown[3] = result(0, f"\n[{length} characters cut]\n" if how == "policy" else "[cut]")
    both(pair, agent(2, task))
    if how == "undeclared":
        assert both(pair, shown, undeclared={"tool": "amortize"}) < CLOSE
    else:
        edits = [{"message": 3, "replacement": "[cut]"}] if how == "declared" else []
        policy = "keep_all" if edits else "truncate_older_than:n=2,max_chars=1"
        assert both(pair, agent(3, task), policy=policy, edits=edits) > CLOSE
        assert pair[0].account["lineage"]["from"] > 0
    session = pair[0].account["session"]
    for options in ({}, {"undeclared": {"tool": "amortize"}}, {"edits": [{"message": 3}]}):
        assert both(pair, shown, **options) < CLOSE
        assert pair[0].account["tokens"]["spliced"] == 0
        assert pair[0].account["lineage"] is None
    more = [*shown, {"role": "user", "content": "And now?"}]
    assert both(pair, more) < CLOSE
    assert session == pair[0].account["session"]


def test_regenerating_is_no_edit(client: httpx.Client, model: str) -> None:
    """The same request again is a prefix hit up to its last token."""
    world = worlds(client, model, "again")[0]
    first, again = (world.ask(agent(2, "Again.")) for _ in range(2))
    assert first == pytest.approx(again, abs=CLOSE)
    tokens = world.account["tokens"]
    assert (tokens["prefix"], world.account["edits"]) == (tokens["prompt"] - 1, [])


def plain(model: str, **members: Any) -> dict[str, Any]:
    """A minimal request."""
    return {"model": model, "messages": [{"role": "user", "content": "Hi."}], "max_tokens": 1} | (
        members
    )


def test_headers_of_other_scripts_pass(client: httpx.Client, model: str) -> None:
    """A title header in Latin-1 or UTF-8 is no reason to fail."""
    headers = [(b"x-title", "Café ☕".encode()), (b"authorization", b"Bearer key-one")]
    assert client.post(CHAT, json=plain(model), headers=headers).status_code == 200


@pytest.mark.parametrize("depth", [100, 800, 5000])
def test_deep_nesting_is_served_or_refused(client: httpx.Client, model: str, depth: int) -> None:
    """Any depth of an unknown member is an answer or a 400, never the proxy's own failure."""
    body = json.dumps(plain(model)).encode()
    deep = b'"Hi.","x":' + b"[" * depth + b"]" * depth
    answer = client.post(CHAT, content=body.replace(b'"Hi."', deep))
    assert answer.status_code in (200, 400)


@pytest.mark.parametrize(
    "member",
    [
        b"1e400",
        b"NaN",
        b"-Infinity",
        b"9" * 5000,
        b"01",
        b'"\xff"',
        b'"\xed\xa0\x80"',
    ],
)
def test_values_that_no_parser_agrees_on_are_refused(
    client: httpx.Client, model: str, member: bytes
) -> None:
    """Numbers and strings at the edge of JSON are a 400 that names the reason."""
    content = json.dumps(plain(model)).encode()[:-1] + b',"x":' + member + b"}"
    answer = client.post(CHAT, content=content)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")


@pytest.mark.parametrize("member", [b"9" * 400, b"-0", b"1E+5", b'{"a":1,"a":2}', b'"\\u0000"'])
def test_odd_but_valid_values_pass(client: httpx.Client, model: str, member: bytes) -> None:
    """Huge integers and repeated keys are the engine's to judge, with and without a policy."""
    for options in ({}, {"leyline": {"policy": "truncate_older_than"}}):
        content = json.dumps(plain(model, **options)).encode()
        content = content.replace(b'"Hi."', b'"Hi.","x":' + member)
        assert client.post(CHAT, content=content).status_code == 200


@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|aa)+$"])
def test_a_slow_pattern_blocks_nobody_else(client: httpx.Client, model: str, pattern: str) -> None:
    """A request's own regular expression takes nobody's time."""
    slow = plain(model, messages=[{"role": "user", "content": "a" * 60 + "b"}])
    slow["leyline"] = {"policy": f"redact:pattern='{pattern}'"}
    with ThreadPoolExecutor(1) as pool:
        request = pool.submit(client.post, CHAT, json=slow)
        begun = time.perf_counter()  # a match holds the interpreter, this thread included
        time.sleep(0.2)
        assert client.get("/healthz").status_code == 200
        waited = time.perf_counter() - begun
        answer = request.result()
    assert waited < 1.0
    assert answer.status_code == 200
    assert answer.json()["leyline"]["policy_faults"] == []
