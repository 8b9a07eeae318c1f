"""SGLang on the CPU platform computes what transformers computes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from sglang_models import SglangModel, shipped_model
from sglang_server import SglangServer
from transformers import AutoModelForCausalLM

NEW_TOKENS = 16
LENGTHS = (15, 250, 1100)
"""Of prompts: within a chunk, over one block of rows, over several chunks of 512."""


def _prompt(length: int, model: Path) -> list[int]:
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    generator = torch.Generator().manual_seed(length)
    return torch.randint(10, vocabulary, (length,), generator=generator).tolist()


def _expected(model: Path, prompts: list[list[int]]) -> list[list[int]]:
    """The greedy continuations that transformers computes in float32."""
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    reference.generation_config.eos_token_id = None
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 3}
    with torch.no_grad():
        answers = [reference.generate(torch.tensor([prompt]), **options) for prompt in prompts]
    pairs = zip(prompts, answers, strict=True)
    return [answer[0, len(prompt) :].tolist() for prompt, answer in pairs]


def _check_tokens(server: SglangServer) -> None:
    prompts = [_prompt(length, server.model) for length in LENGTHS]
    expected = _expected(server.model, prompts)
    assert len({token for answer in expected for token in answer}) > NEW_TOKENS // 2
    server.flush_cache()
    for cached in (0, 1):
        for prompt, answer in zip(prompts, expected, strict=True):
            got = server.generate(prompt, NEW_TOKENS)
            assert got["output_ids"] == answer
            assert got["meta_info"]["cached_tokens"] == cached * (len(prompt) - 1)


def test_mla_tokens_are_those_of_transformers(mla_server: SglangServer) -> None:
    """Greedy tokens of the MLA model equal transformers', without and with a cached prefix."""
    _check_tokens(mla_server)


def test_gqa_tokens_are_those_of_transformers(gqa_server: SglangServer) -> None:
    """Greedy tokens of the Llama model equal transformers', without and with a cached prefix."""
    _check_tokens(gqa_server)


@pytest.mark.nightly
@pytest.mark.parametrize("model", [SglangModel.MLA_MOE, SglangModel.MLA_YARN, SglangModel.QWEN3])
def test_further_models_too(
    model: SglangModel,
    model_folder: Callable[[SglangModel], Path],
    start_server: Callable[..., SglangServer],
) -> None:
    """So do those of a mixture of experts, of YaRN with mscale, and of Qwen3."""
    _check_tokens(start_server(model_folder(model)))


@pytest.mark.nightly
def test_the_shipped_model_too(start_server: Callable[..., SglangServer]) -> None:
    """So do those of the trained model that ships with the package in float16."""
    _check_tokens(start_server(shipped_model()))
