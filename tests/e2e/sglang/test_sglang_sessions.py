"""An agent's session through the proxy before a real SGLang: spliced, and answered as ever."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import Iterator
from contextlib import aclosing
from typing import Any, cast

import httpx
import openai
import pytest
from support.sglang_stack import API_KEY, MODEL, SglangServer, StartProxy

from leyline_lab.demo.recall import (
    QUESTIONS,
    READS,
    SYSTEM_PROMPT,
    TOOLS,
)
from leyline_proxy.render import RenderError
from leyline_proxy.upstream.aiohttp_transport import AiohttpTransport
from leyline_proxy.upstream.client import UpstreamClient
from leyline_proxy.upstream.link import Link
from leyline_proxy.upstream.proof import PROBES, examine_rendering
from leyline_proxy.upstream.tokens import tokenize

SHORTEN = "truncate_older_than:n=5,max_chars=60 | drop_failed_calls"
SECRET = "domain=clover"
REDACT = f'{SHORTEN} | redact:pattern="{SECRET}"'
IN_SIGHT = ("column", "domain")
"""Asked for in the end: their values are in text that no policy has touched."""
FAILED = "Error: no such configuration"
NOISE = (
    "check the result and read each line again before the next step\n"
    "no error found while the module was open and all checks passed\n"
)
Messages = list[dict[str, Any]]


def called(tool: str, name: str, output: str) -> Messages:
    """A call of a tool and what it gave."""
    function = {"name": tool, "arguments": json.dumps({"name": name})}
    call = {"id": f"call_{name}", "type": "function", "function": function}
    return [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": f"call_{name}", "content": output},
    ]


def history(task: str) -> Iterator[Messages]:
    """The conversation before each turn: a failed read, a job, then all the other reads."""
    reads = [("read_config", name, NOISE + output) for name, output in READS]
    opening = [("read_config", "noth", f"{FAILED}\n{NOISE}"), ("run", "clean", "done")]
    messages: Messages = [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": [{"type": "text", "text": part} for part in ("Read.", task)]},
    ]
    for turn in (*opening, *reads):
        yield messages
        messages = messages + called(*turn)
    yield messages


class Agent:
    """A client of one proxy."""

    def __init__(self, origin: str, session: str, *, stream: bool) -> None:
        self._sdk = openai.OpenAI(base_url=f"{origin}/v1", api_key="none", max_retries=0)
        self._headers = {"x-leyline-session": session}
        self._stream = stream
        self.accounts: list[dict[str, Any]] = []

    def ask(self, messages: Messages, *, policy: str = SHORTEN, max_tokens: int = 2) -> str:
        """One turn; its text. Its account is the last of :attr:`accounts`."""
        answer: Any = self._sdk.chat.completions.create(
            model=MODEL,
            messages=cast("Any", messages),
            tools=cast("Any", TOOLS),
            max_tokens=max_tokens,
            temperature=0,
            stream=self._stream,
            extra_headers=self._headers,
            extra_body={"leyline": {"policy": policy}},
        )
        if not self._stream:
            self.accounts.append(answer.model_extra["leyline"])
            return str(answer.choices[0].message.content)
        chunks = list(answer)
        (account,) = (c.model_extra["leyline"] for c in chunks if "leyline" in c.model_extra)
        self.accounts.append(account)
        return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)

    def answers(self, messages: Messages) -> list[str]:
        """The answers to the questions, each asked on its own."""
        asked = [{"role": "user", "content": f"What is `{key}=`?"} for key in IN_SIGHT]
        return [self.ask([*messages, each], max_tokens=24) for each in asked]


def adds_up(account: dict[str, Any]) -> bool:
    """Prefix, spliced and prefilled tokens are the prompt's."""
    tokens = account["tokens"]
    prompt: int = tokens["prompt"]
    return prompt > 0 and prompt == tokens["prefix"] + tokens["spliced"] + tokens["prefilled"]


def test_the_handshake_tells_what_the_engine_is(origin: str) -> None:
    """It is SGLang, it splices, and prompts are rendered here, proven equal."""
    upstream = httpx.get(f"{origin}/readyz").json()["upstreams"][0]
    assert (upstream["engine"], upstream["splices"], upstream["obstacle"]) == ("sglang", True, "")
    assert (upstream["rendering"], upstream["rendering_problem"]) == ("local", "")
    metrics = httpx.get(f"{origin}/metrics").text
    assert (
        f'leyline_engine_splices{{engine="sglang",model="{MODEL}",upstream="engine"}} 1.0'
        in metrics
    )


def test_receipts_come_with_the_answers(engine: SglangServer, start_proxy: StartProxy) -> None:
    """Whole and streamed, and nothing of them is left in what the client gets."""
    origin = start_proxy(engine.base_url)
    *_, messages = history("Tell me of it.")
    for number in range(4):
        body = {"model": MODEL, "messages": messages, "max_tokens": 4, "stream": number % 2 == 0}
        answer = httpx.post(f"{origin}/v1/chat/completions", json=body, timeout=60)
        assert answer.status_code == 200
        assert "leyline_record" not in answer.text and '"prefilled"' in answer.text
    metrics = httpx.get(f"{origin}/metrics").text.splitlines()
    came = [line for line in metrics if line.startswith("leyline_receipts_total{")]
    assert came == ['leyline_receipts_total{came="answer",upstream="engine"} 4.0']


@pytest.mark.parametrize("stream", [False, True])
def test_a_session_is_spliced_and_answered_as_without(
    engine: SglangServer, origin: str, start_proxy: StartProxy, stream: bool
) -> None:
    """Old outputs are cut and a failed call goes: spliced, with the answers of an ordinary run."""
    plain = start_proxy(engine.base_url, splice=False, edit_timing="now")
    agents = [
        Agent(origin, f"spliced-{stream}", stream=stream),
        Agent(plain, f"ordinary-{stream}", stream=stream),
    ]
    said: list[list[str]] = []
    for agent, task in zip(agents, ("Spliced.", "Ordinary"), strict=True):
        for messages in history(f"{task} {stream}"):
            agent.ask(messages)
        said.append(agent.answers(messages))
    spliced, ordinary = (agent.accounts for agent in agents)
    assert all(map(adds_up, spliced + ordinary))
    causes = {edit["cause"] for account in spliced for edit in account["edits"]}
    assert causes >= {"policy:truncate_older_than", "policy:drop_failed_calls"}
    edited = [account for account in spliced if account["reason"] == "spliced"]
    assert len(edited) >= 3
    assert all(account["tokens"]["spliced"] > 0 for account in edited)
    assert not any(account["tokens"]["spliced"] for account in ordinary)
    assert said[0] == said[1]
    assert all(QUESTIONS[key] in text for key, text in zip(IN_SIGHT, said[0], strict=True))


def test_what_is_redacted_later_is_forgotten(origin: str) -> None:
    """A pattern that is switched on in the end reaches what the engine has read before."""
    agent = Agent(origin, "redacted", stream=False)
    for messages in history("Redacted."):
        agent.ask(messages)
    agent.ask(messages, policy=REDACT)
    account = agent.accounts[-1]
    assert account["forgot"]["overwritten"] > 0
    assert "forget" in {edit["mode"] for edit in account["edits"]}
    agent.ask([*messages, {"role": "user", "content": "What is `domain=`?"}], policy=REDACT)
    assert agent.accounts[-1]["tokens"]["prefix"] > 0


def test_options_that_only_the_engine_can_render_are_spliced_too(origin: str) -> None:
    """With an effort, SGLang's own tokens are asked for; the contents are found in them."""
    *_, messages = history("Effort.")
    body = {"model": MODEL, "messages": messages, "max_tokens": 1, "reasoning_effort": "low"}
    for policy in ("keep_all", SHORTEN):
        answer = httpx.post(
            f"{origin}/v1/chat/completions",
            json=body | {"leyline": {"policy": policy}},
            headers={"x-leyline-session": "effort"},
            timeout=60,
        )
    assert answer.json()["leyline"]["tokens"]["spliced"] > 0


def test_bare_completions_pass(origin: str) -> None:
    """They are no turns of a session; the engine answers them as ever."""
    body = {"model": MODEL, "prompt": "What is", "max_tokens": 2}
    answer = httpx.post(f"{origin}/v1/completions", json=body, timeout=60)
    assert answer.status_code == httpx.codes.OK
    assert answer.json()["usage"]["completion_tokens"] > 0


def random_conversations(count: int) -> Iterator[tuple[Messages, dict[str, Any]]]:
    """Requests in every spelling that clients use, some of them refused."""
    chance = random.Random(11)
    texts = ("", "One.", " two\n", "Grüß 👋", '{"a": 1}', "<think>\nx\n</think>\n\ny")
    arguments = ('{"path":"a"}', '{ "b" : [1, 2.0, null] }', "{}", '{"\\u00fc": "\\n"}', "nonsense")

    def content() -> Any:
        text = chance.choice(texts)
        parts = [
            {"type": "text", "text": chance.choice(texts)} for _ in range(chance.randint(0, 3))
        ]
        return chance.choice([text, text, parts])

    def call(number: int) -> dict[str, Any]:
        function: dict[str, Any] = {"arguments": chance.choice(arguments), "name": "read_file"}
        extra = chance.choice([{}, {"index": number}, {"x": 1}])
        return {"id": f"c{number}", "type": "function", "function": function, **extra}

    def message() -> dict[str, Any]:
        role = chance.choice(["system", "user", "user", "assistant", "Assistant", "tool"])
        shown: dict[str, Any] = {"role": role, "content": content()}
        if role.lower() == "assistant":
            shown["content"] = chance.choice([None, content()])
            calls = [call(number) for number in range(chance.randint(0, 2))]
            shown |= chance.choice([{}, {"tool_calls": calls}, {"reasoning_content": "why"}])
        if role == "tool":
            shown |= {"tool_call_id": "c0"}
        return shown | chance.choice([{}, {}, {"name": "ada"}, {"cache_control": {"type": "x"}}])

    for _ in range(count):
        tools = chance.choice([None, [], *(p.members.get("tools") for p in PROBES)])
        members: dict[str, Any] = {"tools": tools} if tools is not None else {}
        members |= chance.choice([{}, {}, {"tool_choice": "none"}, {"tool_choice": "auto"}])
        yield [message() for _ in range(chance.randint(1, 7))], members


def test_random_conversations_render_as_in_sglang(engine: SglangServer) -> None:
    """Messages rendered here have SGLang's own tokens, and those SGLang refuses aren't rendered."""

    async def compare() -> tuple[int, int]:
        client = UpstreamClient(
            Link(engine.base_url, AiohttpTransport(max_connections=4)), api_key=API_KEY
        )
        async with aclosing(client):
            renderer = (await examine_rendering(client, MODEL)).renderer
            assert renderer is not None
            rendered = refused = 0
            for messages, members in random_conversations(200):
                theirs = await tokenize(client, {"model": MODEL, **members, "messages": messages})
                try:
                    ours = renderer.render_request(messages, members).tokens.tolist()
                except RenderError:
                    refused += 1
                    continue
                assert ours == theirs, (messages, members)
                rendered += 1
            return rendered, refused

    rendered, refused = asyncio.run(compare())
    assert rendered > 80
    assert refused > 5


def test_prompts_are_counted_as_the_engine_counts_them(origin: str) -> None:
    """Usage and receipt count the same prompt, streamed or not."""
    for number, messages in enumerate(itertools.islice(history("Counted."), 3)):
        answer = httpx.post(
            f"{origin}/v1/chat/completions",
            json={"model": MODEL, "messages": messages, "max_tokens": 1, "user": "counted"},
            timeout=60,
        ).json()
        assert answer["leyline"]["turn_index"] == number
        assert answer["leyline"]["tokens"]["prompt"] == answer["usage"]["prompt_tokens"]


def test_a_tenants_kv_is_its_own_where_that_is_asked_for(
    engine: SglangServer, start_proxy: StartProxy
) -> None:
    """The same conversation of two tenants: each finds what it computed itself, splices included,
    and nothing of the other's, not even the system prompt."""
    keys = ["red:key-red", "blue:key-blue"]
    origin = start_proxy(engine.base_url, cache_scope="tenant", api_keys=keys, edit_timing="now")
    messages = [*history("Apart.")]
    accounts: dict[str, list[dict[str, Any]]] = {}
    with httpx.Client(base_url=origin, timeout=60) as client:
        for who in ("red", "blue"):
            headers = {"authorization": f"Bearer key-{who}", "x-leyline-session": "apart"}
            for turn in messages:
                body = {"model": MODEL, "messages": turn, "tools": TOOLS, "max_tokens": 2}
                body |= {"temperature": 0, "leyline": {"policy": SHORTEN}}
                answer = client.post("/v1/chat/completions", json=body, headers=headers)
                assert answer.status_code == 200, answer.text
                accounts.setdefault(who, []).append(answer.json()["leyline"])
    red, blue = ([account["tokens"] for account in accounts[who]] for who in ("red", "blue"))
    assert blue[0]["prefix"] == 0, "nothing of the other tenant's"
    assert [each["prefix"] for each in blue] == [each["prefix"] for each in red]
    assert [each["spliced"] for each in blue] == [each["spliced"] for each in red]
    assert any(each["spliced"] for each in red) and any(each["prefix"] for each in red)
