"""The replay engine in SGLang's native form: tokens for tokens, and an empty cache on demand."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
import torch
from starlette.applications import Starlette
from support.engine_http import MESSAGES, client_of, hints, is_idle, record_of
from support.waiting import until

from leyline_replay.models.loader import LoadedModel


def asked(loaded: LoadedModel, text: str = "import os\n" * 40, **body: Any) -> dict[str, Any]:
    """A greedy request."""
    sampling = {"temperature": 0, "max_new_tokens": 6, **body.pop("sampling", {})}
    return {"input_ids": loaded.tokenizer(text)["input_ids"], "sampling_params": sampling} | body


async def generate(app: Starlette, body: dict[str, Any]) -> httpx.Response:
    """The answer."""
    async with client_of(app) as client:
        return await client.post("/generate", json=body)


async def test_tokens_and_the_whole_distribution_are_the_model_s(
    app: Starlette, loaded: LoadedModel
) -> None:
    """Every log probability at the first token is the model's own, and tokens are its greedy."""
    body = asked(loaded, top_logprobs_num=4096, sampling={"ignore_eos": True})
    answer = (await generate(app, body)).json()
    prompt = torch.tensor([body["input_ids"]])
    with torch.inference_mode():
        expected = loaded.model(prompt).logits[0, -1].float().log_softmax(-1)
        greedy = loaded.model.generate(
            prompt, max_new_tokens=6, do_sample=False, pad_token_id=3, eos_token_id=None
        )
    top = answer["meta_info"]["output_top_logprobs"][0]
    assert sorted(token for _, token, _ in top) == list(range(4096))
    found = torch.empty(4096)
    found[[token for _, token, _ in top]] = torch.tensor([value for value, _, _ in top])
    assert torch.allclose(found, expected, atol=1e-3)
    assert answer["output_ids"] == greedy[0, len(body["input_ids"]) :].tolist()
    assert answer["meta_info"]["finish_reason"] == {"type": "length"}
    assert len(answer["meta_info"]["output_top_logprobs"]) == 6


async def test_a_token_that_ends_the_message_is_in_the_answer(
    app: Starlette, loaded: LoadedModel
) -> None:
    """It is the last one, named by the reason, with its log probabilities like all others."""
    text = loaded.tokenizer.apply_chat_template(
        MESSAGES, tokenize=False, add_generation_prompt=True
    )
    body = asked(loaded, text, top_logprobs_num=3, sampling={"max_new_tokens": 200})
    answer = (await generate(app, body)).json()
    end = loaded.tokenizer.eos_token_id
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": end}
    assert answer["output_ids"][-1] == end and end not in answer["output_ids"][:-1]
    tops = answer["meta_info"]["output_top_logprobs"]
    assert [top[0][1] for top in tops] == answer["output_ids"]
    last = {**body, "input_ids": [*body["input_ids"], *answer["output_ids"][:-1]]}
    only = (await generate(app, last)).json()
    assert only["output_ids"] == [end] and only["meta_info"]["output_top_logprobs"][0][0][1] == end


async def test_a_flushed_engine_prefills_again(app: Starlette, loaded: LoadedModel) -> None:
    """After it nothing is cached or retained; while a request runs, it is refused."""
    body = asked(loaded)
    body["sampling_params"]["custom_params"] = hints("one", turn="t1")
    await generate(app, body)
    body["sampling_params"]["custom_params"] = hints("two", turn="t2")
    await generate(app, body)
    assert (await record_of(app, "two"))["receipt"]["tokens"]["prefilled"] == 1
    async with client_of(app) as client:
        assert (await client.post("/flush_cache")).status_code == 200
    body["sampling_params"]["custom_params"] = hints("three", turn="t3")
    await generate(app, body)
    counts = (await record_of(app, "three"))["receipt"]["tokens"]
    assert counts["prefilled"] == counts["prompt"] == len(body["input_ids"])


async def test_a_busy_engine_keeps_its_cache(app: Starlette, loaded: LoadedModel) -> None:
    """A flush beside a running request is a 409."""
    long = asked(loaded, sampling={"max_new_tokens": 3000, "ignore_eos": True})
    async with client_of(app) as client:
        running = asyncio.create_task(client.post("/generate", json=long))
        await until(lambda: not is_idle(app) and bool(app.state.service._running))
        answer = await client.post("/flush_cache")
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "not_idle")
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    for job in list(app.state.service._running):
        app.state.service.cancel(job.job)
    await until(lambda: is_idle(app))


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"input_ids": [4096]}, "prompt"),
        ({"input_ids": "text"}, "input_ids"),
        ({"stream": True}, "stream"),
        ({"top_logprobs_num": -1}, "top_logprobs_num"),
        ({"top_logprobs_num": 200_000}, "top_logprobs_num"),
        ({"sampling_params": {"max_new_tokens": 0}}, "sampling_params.max_new_tokens"),
    ],
)
async def test_wrong_requests_name_the_field(
    app: Starlette, loaded: LoadedModel, wrong: dict[str, Any], param: str
) -> None:
    """A 400, also where an answer would have too many log probabilities."""
    answer = await generate(app, asked(loaded) | wrong)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
