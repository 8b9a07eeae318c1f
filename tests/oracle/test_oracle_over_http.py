"""The oracle's comparison through HTTP: the OpenAI SDK, the proxy and the embedded engine.

Only the tokens come from the engine. What an edit kept is found by comparing two token lists, and
what the contract then says of the answer is computed with plain transformers.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import takewhile
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from oracle_check import BOUND, CONTROL_FACTOR
from oracle_models import OracleModel
from oracle_reference import SINK, Fresh, Keep, LongWay, Piece, Remembered, long_way_round
from starlette.types import ASGIApp
from transformers import AutoModelForCausalLM, AutoTokenizer

from leyline_lab.engines.stack import PromptTap
from leyline_lab.stand_ins.random_models import build_random
from leyline_lab.stand_ins.serving import serving
from leyline_proxy.http.app import create_app
from leyline_proxy.settings import Settings
from leyline_proxy.upstream.embedded import create_embedded_engine

TURNS = 6
CALLER_EDITS = 4
"""From this turn on a caller that edits its history leaves results out of it."""
TOP = 20
COINCIDENCE = 4
"""Equal runs shorter than this mean nothing: single letters and digits that occur everywhere."""
TOOLS = [{"type": "function", "function": {"name": "read", "description": "Reads a file."}}]
Messages = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Scenario:
    """The way a history comes to be edited: by the proxy's policy, or by the caller unannounced."""

    name: str
    options: dict[str, Any]
    """Of the body's ``leyline`` member, on every turn."""
    caller_edits: bool
    edited: tuple[int, ...]
    """Turns whose history differs from what the turn before had sent."""


SPLICED = (
    Scenario("policy", {"policy": "truncate_older_than:n=2,max_chars=120"}, False, (3, 4, 5)),
    Scenario("undeclared", {"undeclared": {"tool": "amortize"}}, True, (CALLER_EDITS,)),
)
EXACT = Scenario("exact", {}, True, (CALLER_EDITS,))


@dataclass(frozen=True, slots=True)
class Stack:
    """A running stack, seen from both ends."""

    sdk: openai.OpenAI
    tap: PromptTap
    engine: ASGIApp
    subject: OracleModel
    """The same weights, loaded once more; its name is the served one."""
    tokens: dict[str, int]
    """Token ids by their text, for every token that is whole characters."""

    def ask_engine(self, method: str, path: str, **options: Any) -> Any:
        """The engine's own answer, without the proxy."""

        async def call() -> Any:
            transport = httpx.ASGITransport(app=self.engine)
            async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
                answer = await client.request(method, path, **options)
                return answer.raise_for_status().json()

        return asyncio.run(call())


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn as the caller got it, and its tokens as the engine names them."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    text: str
    logprobs: tuple[dict[int, float], ...]
    """By token, at each generated one: its own, and those of the most likely tokens."""
    account: dict[str, Any]


@pytest.fixture(scope="module", params=["mla", "qwen3"])
def stack(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    """Proxy and engine on a loopback port, over a tiny model in fp32."""
    folder = build_random(request.param, tmp_path_factory.mktemp("models") / request.param)
    options = {"model": str(folder), "device": "cpu", "pool_tokens": 32_768, "chunk_tokens": 192}
    engine = create_embedded_engine("replay", options)
    tap = PromptTap(engine)
    with (
        serving(create_app(Settings(log_level="warning"), engine_app=tap)) as origin,
        openai.OpenAI(base_url=f"{origin}/v1", api_key="none", max_retries=0) as sdk,
    ):
        assert httpx.get(f"{origin}/readyz").json()["upstreams"][0]["splices"]
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        subject = OracleModel(folder.name, model.requires_grad_(False))
        yield Stack(sdk, tap, engine, subject, token_texts(folder))


def token_texts(folder: Path) -> dict[str, int]:
    """The model's tokens by text; those that are only parts of a character share theirs."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = {tokenizer.decode([token]): token for token in range(len(tokenizer))}
    return {text: token for text, token in texts.items() if "\ufffd" not in text}


def tool_output(number: int) -> str:
    """A long text in which nothing repeats, so that there is only one way to align it."""
    rng = random.Random(number)
    syllables = [a + b for a in "bdfgklmnprstvz" for b in "aeiou"]
    return " ".join("".join(rng.sample(syllables, 3)) for _ in range(60))


def next_messages(messages: Messages, number: int, said: str) -> Messages:
    """The history after an answer: what was said, a call, and the call's result."""
    function = {"name": "read", "arguments": json.dumps({"path": f"notes/{number}.txt"})}
    call = {"id": f"call_{number}", "type": "function", "function": function}
    result = {"role": "tool", "tool_call_id": call["id"], "content": tool_output(number)}
    return [*messages, {"role": "assistant", "content": said, "tool_calls": [call]}, result]


def left_out(messages: Messages) -> Messages:
    """The same without two of the results, as a harness would cut them by itself."""
    results = [i for i, message in enumerate(messages) if message["role"] == "tool"][:3:2]
    gone = {"content": "(gone)"}
    return [m | gone if i in results else m for i, m in enumerate(messages)]


def play(stack: Stack, scenario: Scenario, *, stream: bool) -> list[Turn]:
    """A whole session, each answer sent back as part of the next turn's history."""
    messages: Messages = [
        {"role": "system", "content": "You read files and say what is in them."},
        {"role": "user", "content": f"Read my notes ({scenario.name})."},
    ]
    turns: list[Turn] = []
    for number in range(TURNS):
        if number:
            messages = next_messages(messages, number, turns[-1].text)
        cut = scenario.caller_edits and number >= CALLER_EDITS
        sent = left_out(messages) if cut else messages
        session = f"{scenario.name}-{stream}"
        turns.append(ask(stack, sent, scenario.options, session, stream=stream))
    return turns


def ask(
    stack: Stack, messages: Messages, options: dict[str, Any], session: str, *, stream: bool
) -> Turn:
    """One turn through the SDK, then its tokens from the engine."""
    create: Any = stack.sdk.chat.completions.create
    answer = create(
        model=stack.subject.name,
        messages=messages,
        tools=TOOLS,
        max_tokens=4,
        temperature=0,
        logprobs=True,
        top_logprobs=TOP,
        stream=stream,
        extra_headers={"x-leyline-session": session},
        extra_body={"leyline": options, "ignore_eos": True},
    )
    parts = list(answer) if stream else [answer]
    choices = [part.choices[0] for part in parts]
    texts = [choice.delta.content if stream else choice.message.content for choice in choices]
    (account,) = [p.model_extra["leyline"] for p in parts if "leyline" in p.model_extra]
    sent = json.loads(stack.tap.last or b"")
    assert sent["custom_params"]["kv_hints"]["message_id"] == account["message_id"]
    asked = {"messages": sent["messages"], "tools": sent["tools"]}
    prompt = stack.ask_engine("POST", "/tokenize", json=asked)["tokens"]
    output = stack.ask_engine("GET", f"/leyline/receipts/{account['message_id']}")["output_ids"]
    entries = [entry for c in choices if c.logprobs for entry in c.logprobs.content]
    logprobs = [read_logprobs(stack, *pair) for pair in zip(output, entries, strict=True)]
    text = "".join(text or "" for text in texts)
    return Turn(tuple(prompt), tuple(output), text, tuple(logprobs), account)


def read_logprobs(stack: Stack, token: int, entry: Any) -> dict[int, float]:
    """Log-probabilities at one generated token, by token id."""
    assert stack.tokens.get(entry.token, token) == token
    assert len(entry.top_logprobs) == TOP
    known = [top for top in entry.top_logprobs if top.token in stack.tokens]
    return {stack.tokens[top.token]: top.logprob for top in known} | {token: entry.logprob}


def amortized(source: Remembered, prompt: tuple[int, ...]) -> list[Piece]:
    """The part of ``source`` that is still in ``prompt`` is kept, all else is new."""
    matcher = SequenceMatcher(None, source.tokens, prompt, autojunk=False)
    pieces: list[Piece] = []
    at = 0
    for start, dest, size in matcher.get_matching_blocks():
        if size >= COINCIDENCE:
            pieces += [Fresh(prompt[at:dest]), Keep(source, start, start + size)]
            at = dest + size
    return [*pieces, Fresh(prompt[at:])]


def by_contract(subject: OracleModel, turns: Sequence[Turn], *, amortize: bool) -> list[LongWay]:
    """The contract's expectation of each turn, from its version of the turn before.

    Without ``amortize`` each prompt is computed by itself, whatever came before.
    """
    truths: list[LongWay] = []
    for turn in turns:
        pieces: list[Piece] = [Fresh(turn.prompt)]
        if amortize and truths:
            pieces = amortized(truths[-1].turn, turn.prompt)
        truths.append(long_way_round(subject, pieces, turn.output[:-1], turn.output[-1]))
    return truths


def distance(turn: Turn, truth: LongWay) -> float:
    """Largest |Δ log-probability| of the answer, as a share of its position's largest |logit|."""
    errors: list[float] = []
    for given, logits in zip(turn.logprobs, truth.logits, strict=True):
        expected = torch.log_softmax(logits.double(), dim=-1)
        limit = float(logits.abs().max())
        errors += [abs(value - float(expected[token])) / limit for token, value in given.items()]
    return max(errors)


def check_session(whole: list[Turn], streamed: list[Turn], truths: list[LongWay]) -> None:
    """Every turn, streamed and not, has the contract's log-probabilities and token counts."""
    for index, (one, other, truth) in enumerate(zip(whole, streamed, truths, strict=True)):
        assert (one.prompt, one.output, one.text) == (other.prompt, other.output, other.text)
        assert all(one.account[key] == other.account[key] for key in ("outcome", "edits"))
        assert max(distance(one, truth), distance(other, truth)) <= BOUND
        if index:
            before = whole[index - 1]
            # The answer's last token was never fed, so it has no KV to find.
            pairs = zip((*before.prompt, *before.output[:-1]), one.prompt, strict=False)
            held = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            check_tokens(one, other, truth, held)


def check_tokens(one: Turn, other: Turn, truth: LongWay, held: int) -> None:
    """The receipts count what the contract keeps, and each token once.

    The other session came second, so it also finds what the first left for everyone to share:
    a prompt's exact beginning, up to the first spliced token.
    """
    reused = sum(position >= max(held, SINK) for position in truth.reused)
    for turn in (one, other):
        tokens = turn.account["tokens"]
        assert tokens["prompt"] == len(turn.prompt)
        assert tokens["prefix"] + tokens["spliced"] + tokens["prefilled"] == tokens["prompt"]
        assert tokens["spliced"] == reused
    assert one.account["tokens"]["prefix"] == held <= other.account["tokens"]["prefix"]


def spliced_turns(turns: Sequence[Turn]) -> tuple[int, ...]:
    """The turns of which anything was spliced."""
    return tuple(i for i, turn in enumerate(turns) if turn.account["tokens"]["spliced"] > 0)


@pytest.mark.parametrize("scenario", SPLICED, ids=lambda scenario: scenario.name)
def test_logprobs_over_http_are_the_contracts(stack: Stack, scenario: Scenario) -> None:
    """Edited turns answer as the amortize contract says, and not as a re-prefill would."""
    whole, streamed = (play(stack, scenario, stream=stream) for stream in (False, True))
    check_session(whole, streamed, by_contract(stack.subject, whole, amortize=True))
    assert spliced_turns(whole) == spliced_turns(streamed) == scenario.edited
    reprefilled = by_contract(stack.subject, whole, amortize=False)
    for index in scenario.edited:
        assert whole[index].account["outcome"] == "spliced"
        assert distance(whole[index], reprefilled[index]) >= CONTROL_FACTOR * BOUND


def test_an_edit_that_nobody_allows_is_exact_over_http(stack: Stack) -> None:
    """Without a mapping the same edit answers as a re-prefill does, and not as a splice would."""
    whole, streamed = (play(stack, EXACT, stream=stream) for stream in (False, True))
    check_session(whole, streamed, by_contract(stack.subject, whole, amortize=False))
    assert spliced_turns(whole) == spliced_turns(streamed) == ()
    amortized_turns = by_contract(stack.subject, whole, amortize=True)
    for index in EXACT.edited:
        assert whole[index].account["outcome"] == "reprefilled"
        assert distance(whole[index], amortized_turns[index]) >= CONTROL_FACTOR * BOUND
