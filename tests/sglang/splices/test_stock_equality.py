"""Requests without envelopes get from an SGLang with Leyline what stock SGLang gives them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from equality_kit import draw_tokens
from sglang_models import SglangModel
from sglang_server import SglangServer

from leyline_lab.sglang_cpu.activation import PLATFORM_NAME
from leyline_lab.sglang_cpu.launch import DEFAULT_FLAGS

DECODED = 8
ModelFolder = Callable[[SglangModel], Path]


@pytest.fixture(scope="module")
def stock_server(
    model_folder: ModelFolder, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SglangServer]:
    """SGLang with the same flags, but its own radix cache, and no plugin but the platform."""
    log = tmp_path_factory.mktemp("stock-server") / "log"
    flags = [flag for flag in DEFAULT_FLAGS if not flag.startswith("--radix-cache-backend")]
    assert len(flags) == len(DEFAULT_FLAGS) - 1
    with SglangServer(
        model_folder(SglangModel.MLA),
        log,
        tuple(flags),
        {"SGLANG_PLUGINS": PLATFORM_NAME},
        module="sglang.launch_server",
    ) as server:
        yield server
        server.check_clean()


def draw_prompts(rng: random.Random) -> list[list[int]]:
    """A dozen prompts, most of which begin like another one; some are longer than a chunk."""
    prompts = [draw_tokens(rng, rng.randint(100, 700)) for _ in range(4)]
    while len(prompts) < 12:
        earlier = rng.choice(prompts)
        prompts.append((*earlier[: rng.randint(1, len(earlier))], *draw_tokens(rng, 40)))
    return [list(prompt) for prompt in prompts]


def answers(server: SglangServer) -> list[tuple[Any, ...]]:
    """Tokens, log-probabilities and cached tokens of each prompt, cold and then warm."""
    server.flush_cache()
    prompts = draw_prompts(random.Random(11))
    given = [
        server.generate(prompt, DECODED, return_logprob=True) for prompt in (*prompts, *prompts)
    ]
    return [
        (
            answer["output_ids"],
            answer["meta_info"]["cached_tokens"],
            [score for score, *_ in answer["meta_info"]["output_token_logprobs"]],
        )
        for answer in given
    ]


@pytest.mark.nightly
def test_requests_without_envelopes_are_as_in_stock_sglang(
    mla_server: SglangServer, stock_server: SglangServer
) -> None:
    """Tokens, cached tokens and log-probabilities are equal, cold and warm."""
    with_leyline, stock = answers(mla_server), answers(stock_server)
    assert sum(cached for _, cached, _ in stock) > 0
    for ours, theirs in zip(with_leyline, stock, strict=True):
        assert ours[:2] == theirs[:2]
        assert ours[2] == pytest.approx(theirs[2], abs=1e-6)
