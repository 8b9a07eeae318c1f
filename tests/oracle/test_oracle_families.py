"""Current model families, from their published configurations: splices in the replay engine.

Each is made small, with random weights, and everything about keys kept. What a splice gives is
compared with the contract computed the long way round, and wrong rotations must show.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
from oracle_cases import single_edit_case
from oracle_check import BOUND, CONTROL_FACTOR, check_receipt, play
from oracle_engine import start_engine
from oracle_models import OracleModel, randomized
from transformers import AutoConfig, PreTrainedConfig

from leyline_lab.sglang_models.shrunken import small_config

SHIFTS = ((1, -64), (2, 17))
FAMILIES = (
    "command-a",
    "command-r-08-2024",
    "ernie-4.5-0.3b",
    "ernie-4.5-21b-a3b",
    "gemma-3-text",
    "glm-4.6",
    "glm-4.7-flash",
    "gpt-oss-20b",
    "granite-4-8b-dense",
    "hy3",
    "kimi-k2.5",
    "minimax-m2",
    "ministral-3-14b",
    "mistral-small-24b-2501",
    "olmo-2-7b",
    "olmo-3-7b",
    "phi-4",
    "qwen2.5-7b",
    "qwen3-30b-a3b",
)
REFUSED = {
    "phi-4-mini": "rotary type 'longrope'",
    "laguna-xs.2": "different parts of their keys",
}
LAYERED = frozenset({"command-a", "gemma-3-text", "olmo-3-7b"})
"""Families whose layers turn by different frequencies."""
TAMPERINGS = ("no_rotation", "wrong_pairing", "off_by_one", "wrong_width")


def text_config(name: str) -> PreTrainedConfig:
    """The small configuration of a family's text part, as transformers reads it."""
    small: dict[str, Any] = small_config(name)
    small = small.get("text_config", small) | {"max_position_embeddings": 4096}
    if small.get("sliding_window"):
        # So that it matters in a prompt of 200 tokens.
        small["sliding_window"] = 48
    if "attention_multiplier" in small:
        # Granite's own makes attention of random weights nearly uniform, and hides wrong keys.
        small["attention_multiplier"] = small["hidden_size"] ** -0.5
    if small["model_type"] == "gemma3_text":
        # For the same reason.
        small["query_pre_attn_scalar"] = 16
    kind = {"kimi_k2": "deepseek_v3", "kimi_k25": "deepseek_v3"}.get(
        small["model_type"], small["model_type"]
    )
    return AutoConfig.for_model(kind, **{k: v for k, v in small.items() if k != "model_type"})


@lru_cache(maxsize=2)
def family(name: str) -> OracleModel:
    """A random model of a family."""
    return randomized(name, text_config(name), seed=len(name))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_splices_within_the_bound_and_wrong_rotations_show(name: str) -> None:
    """Both directions: right within the bound, and each wrong rotation far outside of it."""
    subject = family(name)
    capability = start_engine(subject).capability
    assert (capability.splices, capability.unsupported_reason) == (True, "")
    for seed, delta in SHIFTS:
        case = single_edit_case(seed, delta)
        _, edited = play(subject, case)
        check_receipt(edited)
        assert edited.error <= BOUND
        for how in (*TAMPERINGS, *(["other_layer"] if name in LAYERED else [])):
            assert play(subject, case, how)[1].error >= CONTROL_FACTOR * BOUND, how


@pytest.mark.parametrize("name", REFUSED)
def test_a_family_that_is_refused_names_the_reason(name: str) -> None:
    """It is served, and says why it isn't spliced."""
    capability = start_engine(family(name)).capability
    assert not capability.splices
    assert REFUSED[name] in capability.unsupported_reason
