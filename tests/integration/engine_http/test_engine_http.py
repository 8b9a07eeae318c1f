"""The replay engine over HTTP, with a real model: answers."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
import torch
from starlette.applications import Starlette
from support.engine_http import (
    MESSAGES,
    chat,
    client_of,
    complete,
    hints,
    record_of,
    script_answer,
)
from support.sse import sse

from leyline_engine.contract import (
    Capability,
    CopySegment,
    Directive,
    LiteralSegment,
    SourceRef,
    token_digest,
)
from leyline_replay.models.loader import LoadedModel


async def test_greedy_tokens_equal_generate(app: Starlette, loaded: LoadedModel) -> None:
    """Greedy tokens are those of transformers' own generate, chunked prefill or not."""
    prompt = loaded.tokenizer("import os\n" * 300)["input_ids"]
    with torch.inference_mode():
        expected = loaded.model.generate(
            torch.tensor([prompt]), max_new_tokens=24, do_sample=False, pad_token_id=3
        )[0, len(prompt) :].tolist()
    answer = await complete(
        app, prompt=prompt, max_tokens=24, custom_params=hints("greedy", turn="t1")
    )
    record = await record_of(app, "greedy")
    assert record["output_ids"] == expected
    assert answer["choices"][0]["text"] == loaded.tokenizer.decode(
        expected, skip_special_tokens=True
    )


async def test_chat_json_shape(app: Starlette) -> None:
    """A chat answer has OpenAI's shape and counts what it used."""
    response = await chat(app, max_completion_tokens=5, ignore_eos=True)
    assert response.status_code == 200
    answer = response.json()
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "leyline-recall"
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["role"] == "assistant"
    usage = answer["usage"]
    assert usage["completion_tokens"] == 5
    assert usage["total_tokens"] == usage["prompt_tokens"] + 5
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
    again = (await chat(app, max_completion_tokens=5, ignore_eos=True)).json()
    assert again["choices"] == answer["choices"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1


async def test_chat_stream_equals_json(app: Starlette) -> None:
    """A stream has the role first, then the same text, the reason, the usage and [DONE]."""
    whole = (await chat(app, max_tokens=9, ignore_eos=True)).json()
    response = await chat(
        app,
        max_tokens=9,
        ignore_eos=True,
        stream=True,
        stream_options={"include_usage": True},
    )
    assert response.headers["content-type"].startswith("text/event-stream")
    events = sse(response.text)
    assert events[-1] == "[DONE]"
    chunks = events[:-1]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 9
    assert chunks[-2]["choices"][0]["finish_reason"] == "length"
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks[:-1])
    assert text == whole["choices"][0]["message"]["content"]


async def test_completion_stream_equals_json(app: Starlette) -> None:
    """A streamed completion gives the same text as a whole one."""
    body = {"prompt": "def main():", "max_tokens": 8, "ignore_eos": True}
    whole = await complete(app, **body)
    async with client_of(app) as client:
        response = await client.post(
            "/v1/completions", json={**body, "temperature": 0, "stream": True}
        )
    events = sse(response.text)
    assert events[-1] == "[DONE]"
    assert events[-2]["choices"][0]["finish_reason"] == "length"
    text = "".join(event["choices"][0]["text"] for event in events[:-1])
    assert text == whole["choices"][0]["text"]
    assert whole["object"] == events[0]["object"] == "text_completion"


async def test_stop_strings_end_the_answer(app: Starlette) -> None:
    """The answer ends before the stop string, in a stream too."""
    prompt = "def main():"
    full = (await complete(app, prompt=prompt, max_tokens=30, ignore_eos=True))["choices"][0]
    stop = full["text"][9:14]
    before = full["text"][: full["text"].index(stop)]
    answer = await complete(app, prompt=prompt, max_tokens=30, ignore_eos=True, stop=[stop])
    assert answer["choices"][0]["text"] == before
    assert answer["choices"][0]["finish_reason"] == "stop"
    async with client_of(app) as client:
        response = await client.post(
            "/v1/completions",
            json={
                "prompt": prompt,
                "max_tokens": 30,
                "temperature": 0,
                "ignore_eos": True,
                "stop": stop,
                "stream": True,
            },
        )
    events = sse(response.text)[:-1]
    assert "".join(event["choices"][0]["text"] for event in events) == before


async def test_end_token_ends_the_answer(app: Starlette, loaded: LoadedModel) -> None:
    """The model's end token stops the answer and isn't part of its text, but of the turn."""
    end = loaded.tokenizer.eos_token_id
    response = await chat(
        app, max_tokens=9, logit_bias={str(end): 100}, custom_params=hints("end", turn="t1")
    )
    choice = response.json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "stop")
    assert (await record_of(app, "end"))["output_ids"] == [end]


async def test_logprobs_of_tokens_without_text(app: Starlette) -> None:
    """Special tokens yield no text, but each sampled token has its log-probability."""
    bias = {"2": 100}
    response = await chat(app, max_tokens=4, ignore_eos=True, logprobs=True, logit_bias=bias)
    answer = response.json()
    assert answer["usage"]["completion_tokens"] == 4
    assert len(answer["choices"][0]["logprobs"]["content"]) == 4


async def test_logprobs(app: Starlette) -> None:
    """Log probabilities come with each token, in both endpoints' shapes."""
    response = await chat(app, max_tokens=6, ignore_eos=True, logprobs=True, top_logprobs=3)
    choice = response.json()["choices"][0]
    content = choice["logprobs"]["content"]
    assert len(content) == 6
    for entry in content:
        assert entry["logprob"] <= 0
        assert len(entry["top_logprobs"]) == 3
        assert entry["top_logprobs"][0]["logprob"] == entry["logprob"]  # greedy
    answer = await complete(app, prompt="x = 1", max_tokens=4, ignore_eos=True, logprobs=2)
    logprobs = answer["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == 4
    assert all(len(top) == 2 for top in logprobs["top_logprobs"])


async def test_seed_repeats_a_sampled_answer(app: Starlette) -> None:
    """Equal seeds give equal answers when sampled, with and without a warm cache."""
    # At 2, since the model is too sure of its answers to vary them at 1.
    bodies = [{"temperature": 2, "max_tokens": 12, "seed": seed} for seed in (5, 5, 6)]
    texts = [
        (await chat(app, **body)).json()["choices"][0]["message"]["content"] for body in bodies
    ]
    assert texts[0] == texts[1] != texts[2]


async def test_tokenize_matches_the_prompt(app: Starlette, loaded: LoadedModel) -> None:
    """/tokenize gives exactly the tokens of transformers' chat template."""
    async with client_of(app) as client:
        answer = (await client.post("/tokenize", json={"messages": MESSAGES})).json()
        plain = (await client.post("/tokenize", json={"prompt": "a b"})).json()
    expected = loaded.tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True)
    assert answer == {"tokens": expected["input_ids"], "count": len(expected["input_ids"])}
    assert plain["tokens"] == loaded.tokenizer("a b")["input_ids"]


async def test_documents(app: Starlette, loaded: LoadedModel) -> None:
    """Capability, models, health and renderer answer; an unknown receipt is a 404."""
    async with client_of(app) as client:
        capability = (await client.get("/leyline/capability")).json()
        assert capability["model_fingerprint"] == loaded.fingerprint
        assert capability["splices"] is True
        models = (await client.get("/v1/models")).json()
        assert [model["id"] for model in models["data"]] == ["leyline-recall"]
        assert (await client.get("/health")).json() == {"status": "ok"}
        renderer = (await client.get("/leyline/renderer")).json()
        assert renderer["chat_template"] == loaded.tokenizer.chat_template
        assert renderer["special_tokens"]["eos_token"] == "<|im_end|>"
        assert json.loads(renderer["tokenizer_json"])["model"]["type"] == "BPE"
        missing = await client.get("/leyline/receipts/nothing")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
        unknown = await client.get("/v2/else")
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "not_found")


async def test_an_edit_is_spliced_and_receipted(app: Starlette, loaded: LoadedModel) -> None:
    """A turn with a span cut out of the one before reuses the KV after the span."""
    source = loaded.tokenizer("value = compute(1, 2)\n" * 40)["input_ids"]
    await complete(app, prompt=source, max_tokens=1, custom_params=hints("m1", turn="t1"))
    first = await record_of(app, "m1")
    tokens = source + first["output_ids"]
    prompt = source[:100] + source[150:] + [7, 8, 9]
    kept = len(source) - 150
    payload = {
        "turn": "t2",
        "sources": (SourceRef("t1", len(tokens), token_digest(tokens)),),
        "directives": (Directive(100, 150),),
        "segments": (
            CopySegment(0, 0, 100, 0),
            CopySegment(0, 150, len(source), 100),
            LiteralSegment(100 + kept, 3),
        ),
    }
    answer = await complete(app, prompt=prompt, max_tokens=1, custom_params=hints("m2", **payload))
    record = await record_of(app, "m2")
    receipt = record["receipt"]
    assert (receipt["outcome"], receipt["reason"], record["finished"]) == (
        "spliced",
        "spliced",
        True,
    )
    counts = receipt["tokens"]
    assert (counts["prefix"], counts["spliced"], counts["prefilled"]) == (100, kept, 3)
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == counts["prefix"] + counts["spliced"]


async def test_tool_calls_are_returned(app: Starlette, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that calls a tool comes back as tool_calls, whole and streamed."""
    call = 'Sure.\n<tool_call>\n{"name": "ls", "arguments": {"path": "."}}\n</tool_call>'
    script_answer(app, monkeypatch, call)
    tools = [{"type": "function", "function": {"name": "ls", "parameters": {}}}]
    choice = (await chat(app, tools=tools, max_tokens=60)).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Sure."
    function = choice["message"]["tool_calls"][0]["function"]
    assert function == {"name": "ls", "arguments": '{"path": "."}'}
    events = sse((await chat(app, tools=tools, max_tokens=60, stream=True)).text)[:-1]
    deltas = [event["choices"][0]["delta"] for event in events]
    assert "".join(delta.get("content", "") for delta in deltas) == "Sure."
    calls = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    assert [entry["function"] for entry in calls] == [function]
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"
    plain = (await chat(app, max_tokens=60)).json()["choices"][0]
    assert plain["message"]["content"] == call


@pytest.mark.parametrize("tools", [None, [{"type": "function", "function": {"name": "ls"}}]])
@pytest.mark.parametrize("given", [{}, {"stream": True}, {"stream": True, "usage": True}])
async def test_an_answer_brings_its_record(
    app: Starlette, given: dict[str, Any], tools: object
) -> None:
    """A request for it gets it as the last member of the body, or of the chunk that finishes; the
    rest of the answer is the same."""
    stream = bool(given.get("stream"))
    options = {"stream": stream, "stream_options": {"include_usage": bool(given.get("usage"))}}
    asked = hints("in-answer", turn="t1", receipt_in_answer=True)
    answers = [
        await chat(app, max_tokens=3, tools=tools, custom_params=custom, **options)
        for custom in (asked, hints("not-asked", turn="t2"))
    ]
    parts = [sse(each.text)[:-1] if stream else [each.json()] for each in answers]
    assert len(parts[0]) == len(parts[1])
    assert not any("leyline_record" in part for part in parts[1])
    (carrier,) = [part for part in parts[0] if "leyline_record" in part]
    assert [*carrier][-1] == "leyline_record"
    assert carrier["choices"][0]["finish_reason"] is not None
    record = carrier["leyline_record"]
    assert record == await record_of(app, "in-answer")
    assert record["finished"] and record["output_ids"]
    assert record["receipt"]["skipped_actions"] == []


async def test_only_chat_answers_bring_records(app: Starlette) -> None:
    """Bare completions don't, and the capability document says what does."""
    custom = hints("bare", turn="t1", receipt_in_answer=True)
    answer = await complete(app, prompt="a b", max_tokens=1, custom_params=custom)
    assert "leyline_record" not in answer
    async with client_of(app) as client:
        document = (await client.get("/leyline/capability")).json()
    assert msgspec.convert(document, Capability).receipt_in_answer
