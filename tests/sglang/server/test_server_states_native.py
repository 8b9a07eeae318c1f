"""Real servers of models with windows and recurrent states answer as transformers does.

Nothing is spliced: this is SGLang's own serving on the CPU platform, on which the tests of splices
of such models rest.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from sglang_models import SglangModel
from sglang_server import SglangServer
from transformers import AutoModelForCausalLM

TOLERANCE = 1e-4
CHUNK = 512
"""Tokens of a chunk of prefill, the launcher's."""
NO_BUFFER = ("--mamba-radix-cache-strategy=no_buffer", "--disable-overlap-schedule")
EXTRA_BUFFER = ("--mamba-radix-cache-strategy=extra_buffer",)

_FURTHER = (
    SglangModel.QWEN3_5,
    SglangModel.MELLUM,
    SglangModel.GRANITE_HYBRID,
    SglangModel.LFM2,
)

ModelFolder = Callable[[SglangModel], Path]
StartServer = Callable[..., SglangServer]


@dataclass(frozen=True)
class Native:
    """A server, and its model as transformers runs it."""

    server: SglangServer
    model: Any

    def answer(self, prompt: list[int], count: int = 6) -> tuple[list[int], int]:
        """Return an answer whose tokens' log probabilities are transformers', and how many tokens
        of its prompt were cached."""
        got = self.server.generate(prompt, count, return_logprob=True, logprob_start_len=-1)
        pairs = got["meta_info"]["output_token_logprobs"]
        tokens = [token for _, token, _ in pairs]
        assert len(tokens) == count
        scores = torch.tensor([score for score, _, _ in pairs])
        expected = self.log_probabilities(prompt, tokens)
        chosen = expected.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert (scores - chosen).abs().max() < TOLERANCE
        assert (expected.max(-1).values - chosen).max() < TOLERANCE
        # Control: the first tokens, long out of every window, still matter.
        other = self.log_probabilities([prompt[0] ^ 1, *prompt[1:]], tokens)
        assert (expected - other).abs().max() > TOLERANCE
        return tokens, int(got["meta_info"]["cached_tokens"])

    def log_probabilities(self, prompt: list[int], answer: list[int]) -> torch.Tensor:
        """fp32 ``[tokens, vocabulary]`` for each token of an answer, computed at once."""
        with torch.no_grad():
            logits = self.model(torch.tensor([prompt + answer[:-1]]), use_cache=False).logits
        result: torch.Tensor = logits[0, len(prompt) - 1 :].log_softmax(-1)
        return result


def check_native(server: SglangServer) -> None:
    """Check cold prompts in one chunk and in several, hits, branches, a long answer and what
    follows it, and several requests at once."""
    model = AutoModelForCausalLM.from_pretrained(
        server.model, dtype=torch.float32, attn_implementation="eager"
    )
    native, random = Native(server, model), Random()

    def fresh(count: int) -> list[int]:
        return random.choices(range(4, model.config.vocab_size), k=count)

    server.flush_cache()
    prompt = fresh(CHUNK + 200)
    for cold in (fresh(1), fresh(70), prompt):
        assert native.answer(cold)[1] == 0
    # A state lies at the end of each chunk at least.
    for end in (len(prompt), CHUNK + 120, CHUNK + 3):
        assert native.answer(prompt[:end] + fresh(9))[1] >= CHUNK
    native.answer(prompt[:300] + fresh(9))
    short = fresh(90)
    answer, _ = native.answer(short, 400)
    assert native.answer([*short, *answer, *fresh(9)])[1] >= 256
    prompts = [prompt[:end] + fresh(30) for end in (20, 400, 700)]
    prompts += [fresh(count) for count in (3, 150, 600)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        list(pool.map(lambda each: native.answer(each, 40), prompts))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("model", "flags"),
    [
        pytest.param(SglangModel.QWEN3_NEXT, (*EXTRA_BUFFER, "--page-size=16"), id="qwen3_next"),
        pytest.param(SglangModel.GPT_OSS, (), id="gpt_oss"),
    ],
)
def test_a_server_answers_as_transformers(
    model: SglangModel,
    flags: tuple[str, ...],
    model_folder: ModelFolder,
    start_server: StartServer,
) -> None:
    """Recurrent states that the tree keeps, windows and sinks give transformers' answers."""
    check_native(start_server(model_folder(model), *flags))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("model", "flags"),
    [
        pytest.param(SglangModel.QWEN3_NEXT, NO_BUFFER, id="qwen3_next-no_buffer"),
        pytest.param(SglangModel.QWEN3_NEXT, EXTRA_BUFFER, id="qwen3_next-extra_buffer"),
        pytest.param(SglangModel.MELLUM, ("--page-size=16",), id="mellum-pages"),
        *(pytest.param(model, (), id=model.value) for model in _FURTHER),
    ],
)
def test_further_servers_too(
    model: SglangModel,
    flags: tuple[str, ...],
    model_folder: ModelFolder,
    start_server: StartServer,
) -> None:
    """So do other ways to keep states, and models of further kinds."""
    check_native(start_server(model_folder(model), *flags))
