"""Tiny random models whose logits are far from ties and depend strongly on position.

Each is a published architecture at toy size in fp32. The usual initialisation (std 0.02) makes
attention nearly uniform, so that a key rotated wrongly would change nothing measurable; here
queries and keys get weights wide enough that attention is peaked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    GlmConfig,
    LlamaConfig,
    PhiConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    StableLmConfig,
)

VOCAB = 512
LAYERS = 3
_HIDDEN = 64
_HEADS = 4

_QUERY_KEY = ("q_proj", "q_b_proj", "k_proj", "kv_a_proj_with_mqa")
_TABLES = ("embed_tokens", "lm_head")


@dataclass(frozen=True, slots=True)
class OracleModel:
    """A model and the name it goes by in test ids."""

    name: str
    model: PreTrainedModel
    kv_dtype: torch.dtype | None = None
    """Dtype in which keys and values are kept, and read from; None for the model's own."""

    @property
    def config(self) -> Any:
        """The model's configuration."""
        return self.model.config


def _base(layers: int) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": 0,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "hidden_size": _HIDDEN,
        "intermediate_size": 96,
        "num_hidden_layers": layers,
        "num_attention_heads": _HEADS,
    }


def plain_config(layers: int = LAYERS, *, mla: bool = False) -> dict[str, Any]:
    """Sizes of a toy model, for configurations of other architectures."""
    return _mla(layers) if mla else _gqa(layers)


def _gqa(layers: int) -> dict[str, Any]:
    return {**_base(layers), "num_key_value_heads": 2}


def _mla(layers: int) -> dict[str, Any]:
    return {
        **_base(layers),
        "num_key_value_heads": _HEADS,
        "q_lora_rank": None,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "head_dim": 16,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": layers,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
    }


_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 512,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 0.5,
}
"""The two mscales differ, so that keys in the cache really carry a factor other than 1."""

_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
_LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}

_CONFIGS: dict[str, Callable[[int], PreTrainedConfig]] = {
    "llama": lambda layers: LlamaConfig(**_gqa(layers)),
    "llama-linear": lambda layers: LlamaConfig(**_gqa(layers), rope_parameters=_LINEAR),
    "llama-llama3": lambda layers: LlamaConfig(**_gqa(layers), rope_parameters=_LLAMA3),
    "qwen3": lambda layers: Qwen3Config(**_gqa(layers), head_dim=32),
    "stablelm-partial": lambda layers: StableLmConfig(
        **_gqa(layers),
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
    ),
    "glm-partial-interleaved": lambda layers: GlmConfig(
        **_gqa(layers),
        head_dim=16,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
    ),
    "deepseek-v2": lambda layers: DeepseekV2Config(**_mla(layers), topk_method="greedy"),
    "deepseek-v2-yarn": lambda layers: DeepseekV2Config(
        **_mla(layers), topk_method="greedy", rope_parameters=_YARN
    ),
    "deepseek-v3": lambda layers: DeepseekV3Config(**_mla(layers), rope_interleave=True),
    "deepseek-v3-yarn": lambda layers: DeepseekV3Config(
        **_mla(layers), rope_interleave=True, rope_parameters=_YARN
    ),
    "deepseek-v3-half": lambda layers: DeepseekV3Config(**_mla(layers), rope_interleave=False),
    "llama-yarn": lambda layers: LlamaConfig(**_gqa(layers), rope_parameters=_YARN),
    "phi-partial": lambda layers: PhiConfig(
        **_gqa(layers),
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
    ),
}

MODEL_NAMES = tuple(_CONFIGS)


def build_model(name: str, layers: int = LAYERS) -> OracleModel:
    """A model of the given architecture with seeded random weights, fp32, in eval mode."""
    return randomized(name, _CONFIGS[name](layers), MODEL_NAMES.index(name) + 1)


def randomized(name: str, config: PreTrainedConfig, seed: int) -> OracleModel:
    """A model of any configuration, its weights wide enough for attention to be peaked."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(999 + seed)
    with torch.no_grad():
        for path, weight in model.named_parameters():
            weight.requires_grad_(False)
            if weight.dim() < 2:
                continue
            weight.normal_(0.0, _spread(path), generator=generator)
    return OracleModel(name, model)


def _spread(path: str) -> float:
    if any(part in path for part in _TABLES):
        return 0.5
    return 0.2 if any(part in path for part in _QUERY_KEY) else 0.12
