"""The allow-list, entry by entry: what is on it splices right, what is not is refused by name.

Real architectures at toy size. A refused model is served all the same: its edits run as ordinary
prefills.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle_cases import draw_tokens, single_edit_case
from oracle_check import BOUND, CONTROL_FACTOR, check_receipt, play, relative_error
from oracle_engine import Conversation, edited_prompt, run_request, start_engine
from oracle_models import MODEL_NAMES, OracleModel, build_model, plain_config, randomized
from transformers import (
    DeepseekV32Config,
    Gemma2Config,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
)

from leyline_engine.contract import Outcome, Reason
from leyline_replay.models.rotary_probe import read_model_facts

Models = Callable[[str], OracleModel]

SHIFTS = ((1, -64), (2, 17))

ACCEPTED = {
    "llama": ("gqa", "default"),
    "llama-linear": ("gqa", "linear"),
    "llama-llama3": ("gqa", "llama3"),
    "llama-yarn": ("gqa", "yarn"),
    "qwen3": ("gqa", "default"),
    "stablelm-partial": ("gqa", "default"),
    "glm-partial-interleaved": ("gqa", "default"),
    "phi-partial": ("gqa", "default"),
    "deepseek-v2": ("mla_latent", "default"),
    "deepseek-v2-yarn": ("mla_latent", "yarn"),
    "deepseek-v3": ("mla_latent", "default"),
    "deepseek-v3-half": ("mla_latent", "default"),
    "deepseek-v3-yarn": ("mla_latent", "yarn"),
}
"""By model: pool class and rotary type."""

PARTIAL = ("stablelm-partial", "glm-partial-interleaved", "phi-partial")
HALF_PRECISION = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""By dtype, the largest relative error of one rounding."""


def rope(kind: str, **options: Any) -> dict[str, Any]:
    """Rotary parameters of a kind."""
    return {"rope_type": kind, "rope_theta": 10000.0, **options}


def longrope() -> dict[str, Any]:
    """LongRoPE: other frequencies after position 512."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    return rope("longrope", factor=4.0, original_max_position_embeddings=512, **factors)


REFUSED: dict[str, tuple[Callable[[dict[str, Any]], PreTrainedConfig], str]] = {
    "longrope": (lambda base: Phi3Config(**base, rope_parameters=longrope()), "'longrope'"),
    "dynamic NTK": (
        lambda base: LlamaConfig(**base, rope_parameters=rope("dynamic", factor=2.0)),
        "'dynamic'",
    ),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_an_accepted_model_splices_within_the_bound(name: str, oracle_model: Models) -> None:
    """Each entry is accepted for what it is, and a splice gives the contract's logits."""
    subject = oracle_model(name)
    capability = start_engine(subject).capability
    assert capability.rotary is not None
    assert capability.kv is not None
    assert (capability.splices, capability.unsupported_reason) == (True, "")
    assert (capability.kv.pool_class, capability.rotary.rope_type) == ACCEPTED[name]
    for seed, delta in SHIFTS:
        _, edited = play(subject, single_edit_case(seed, delta))
        check_receipt(edited)
        assert edited.receipt.reason is Reason.SPLICED
        assert edited.error <= BOUND


def test_every_model_of_the_oracle_is_on_the_list() -> None:
    """No architecture is compared elsewhere whose entry isn't stated here."""
    assert set(ACCEPTED) == set(MODEL_NAMES)


@pytest.mark.parametrize("name", PARTIAL)
def test_partial_rotary_is_measured(name: str, oracle_model: Models) -> None:
    """The band that turns is narrower than the key."""
    layout = start_engine(oracle_model(name)).cache.pool.layout
    assert 0 < layout.rotary_dim < layout.shapes[0][layout.rotary_tensor][1]


def test_query_and_key_norms_are_there(oracle_model: Models) -> None:
    """Control: the model chosen for q/k norms really has them."""
    attention = oracle_model("qwen3").model.base_model.layers[0].self_attn
    assert attention.q_norm.weight.shape == attention.k_norm.weight.shape == (32,)


@pytest.mark.parametrize("dtype", HALF_PRECISION, ids=str)
@pytest.mark.parametrize("name", ["llama", "stablelm-partial", "deepseek-v2-yarn", "deepseek-v3"])
def test_half_precision_is_spliced_as_precisely_as_it_can_be(name: str, dtype: torch.dtype) -> None:
    """In 16 bits a splice is off by a few roundings, and a wrong one by far more."""
    subject = OracleModel(name, build_model(name).model.to(dtype))
    bound = 16 * HALF_PRECISION[dtype]
    for seed, delta in SHIFTS:
        case = single_edit_case(seed, delta)
        opened, edited = play(subject, case)
        check_receipt(edited)
        assert max(opened.error, edited.error) <= bound
        assert play(subject, case, "no_rotation")[1].error >= 4 * bound


WINDOWED: dict[str, Callable[[dict[str, Any]], PreTrainedConfig]] = {
    "every layer": lambda base: MistralConfig(**base, sliding_window=40),
    "some layers": lambda base: Qwen2Config(
        **base, use_sliding_window=True, sliding_window=40, max_window_layers=1
    ),
    "every other layer": lambda base: Gemma2Config(**base, head_dim=16, sliding_window=40),
}


@pytest.mark.parametrize("name", WINDOWED)
def test_a_windowed_model_keeps_all_rows_and_its_window(name: str) -> None:
    """An edit is spliced, and what is computed after it looks as far back as the model does."""
    subject = randomized(name, WINDOWED[name](plain_config(layers=2)), seed=1)
    conversation = Conversation(start_engine(subject, chunk_tokens=64))
    assert conversation.engine.capability.splices
    rng = random.Random(5)
    opened = conversation.open(draw_tokens(rng, 200), (1, 2), 3)
    ran = conversation.edit([(150, 151, ())], (8, 9), (1, 2))
    assert ran.receipt.tokens.spliced > 0
    whole = torch.tensor([[*opened.tokens[:200], 1, 2]])
    with torch.inference_mode():
        alone = list(subject.model(input_ids=whole, use_cache=False).logits[0, -3:])
    assert relative_error(opened.logits, alone) <= BOUND
    unbounded = randomized(name, WINDOWED[name](plain_config(layers=2)), seed=1)
    unbounded.model.config.sliding_window = 400
    for layer in unbounded.model.base_model.layers:
        layer.self_attn.sliding_window = None
    with torch.inference_mode():
        wider = list(unbounded.model(input_ids=whole, use_cache=False).logits[0, -3:])
    assert relative_error(opened.logits, wider) >= CONTROL_FACTOR * BOUND


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_model_names_the_reason_and_serves_edits_as_prefills(name: str) -> None:
    """The capability says why; an edit gets ``unsupported_runtime`` and the answer is exact."""
    configure, said = REFUSED[name]
    subject = randomized(name, configure(plain_config(layers=2)), seed=1)
    conversation = Conversation(start_engine(subject, chunk_tokens=64))
    capability = conversation.engine.capability
    assert not capability.splices
    assert said in capability.unsupported_reason
    rng = random.Random(5)
    opened = conversation.open(draw_tokens(rng, 200), (1, 2), 3)
    edits, tail = [(60, 90, (7, 7))], (8, 9)
    ran = conversation.edit(edits, tail, (1, 2))
    assert (ran.receipt.outcome, ran.receipt.reason) == (
        Outcome.REPREFILLED,
        Reason.UNSUPPORTED_RUNTIME,
    )
    assert (ran.receipt.tokens.prefix, ran.receipt.tokens.spliced) == (60, 0)
    prompt = edited_prompt(opened.tokens, edits, tail)
    plain = run_request(start_engine(subject), prompt, (1, 2))
    assert relative_error(ran.logits, plain.logits) <= BOUND
    whole = torch.tensor([[*prompt, 1, 2]])
    with torch.inference_mode():
        model_alone = subject.model(input_ids=whole, use_cache=False).logits[0, -3:]
    assert relative_error(ran.logits, list(model_alone)) <= BOUND
    wrong = torch.roll(model_alone, 1, dims=0)
    assert relative_error(ran.logits, list(wrong)) >= CONTROL_FACTOR * BOUND


@pytest.mark.parametrize("dtype", [torch.float64], ids=str)
def test_another_dtype_is_refused_by_name(dtype: torch.dtype) -> None:
    """KV of a dtype that no test covers is held and served, but not spliced."""
    subject = OracleModel("llama", build_model("llama").model.to(dtype))
    conversation = Conversation(start_engine(subject))
    assert str(dtype) in conversation.engine.capability.unsupported_reason
    conversation.open(draw_tokens(random.Random(6), 200), (1, 2), 3)
    ran = conversation.edit([(60, 90, ())], (8, 9), (1,))
    assert (ran.receipt.reason, ran.receipt.tokens.spliced) == (Reason.UNSUPPORTED_RUNTIME, 0)


def test_sparse_attention_is_refused_by_name() -> None:
    """A second, rotated index key would have to move as well."""
    options = plain_config(layers=2, mla=True) | {"q_lora_rank": 16}
    config = DeepseekV32Config(**options, index_topk=16, index_n_heads=2, index_head_dim=16)
    facts = read_model_facts(randomized("sparse", config, seed=1).model)
    assert "index key" in facts.unsupported
