"""Tiny random models that keep state per sequence: sliding windows, or recurrent layers.

Each is loadable by SGLang and by transformers, with the shipped models' tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from transformers import AutoTokenizer, PreTrainedConfig

from leyline_replay.models.trained import DEFAULT_MODEL_NAME, trained_model_dir

from .random_models import build_model

WINDOW = 32
"""Tokens that a windowed layer sees, its own included."""


class StateKind(StrEnum):
    """The models that :func:`build_state_model` makes."""

    QWEN3_NEXT = "qwen3_next"
    """Gated DeltaNet and full attention by turns of four, a mixture of experts."""
    QWEN3_5 = "qwen3_5"
    """Gated DeltaNet in another layout of its projections, dense."""
    MELLUM = "mellum"
    """Windows of 32 on three layers of four, each kind with a base frequency of its own."""
    GPT_OSS = "gpt_oss"
    """Windows of 32 on every other layer, sinks in all, a mixture of experts with biases."""
    GEMMA3 = "gemma3"
    """Windows of 32 on three layers of four, in one pool with the others' rows."""
    OLMO3 = "olmo3"
    """Windows of 32 on three layers of four, normed after attention."""
    NEMOTRON_H = "nemotron_h"
    """Mamba2, attention without rotary, and feed-forward layers one by one."""
    GRANITE_HYBRID = "granite_hybrid"
    """Mamba2 and attention without rotary, each before a mixture of experts."""
    KIMI_LINEAR = "kimi_linear"
    """Kimi Delta Attention and latent KV without rotary, a mixture of experts."""
    LFM2 = "lfm2"
    """Gated short convolutions and attention."""


STATE_MODELS: Final[Mapping[str, StateKind]] = {
    "qwen3-next-tiny": StateKind.QWEN3_NEXT,
    "mellum-tiny": StateKind.MELLUM,
}
"""Models that benchmarks of a live server take by name."""


def build_state_model(kind: StateKind, folder: Path) -> Path:
    """Write a random float32 model and the shipped tokenizer to ``folder``, once; returns it."""
    if folder.is_dir():
        return folder
    network = build_model(_CONFIGS[kind](_SHAPE))
    _let_states_matter(network)
    network.save_pretrained(folder)
    _add_keys(folder / "config.json", _LEFT_OUT.get(kind, {}))
    shipped = trained_model_dir(DEFAULT_MODEL_NAME)
    assert shipped is not None
    AutoTokenizer.from_pretrained(shipped).save_pretrained(folder)
    return folder


_SHAPE: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 16384,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 3,
    "tie_word_embeddings": False,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_BLOCKS = ["mamba", "mlp", "mamba", "attention", "mamba", "mlp"]
_WINDOWED = ["sliding_attention"] * 3 + ["full_attention"]
_DELTA = {
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}


def _rope(theta: float = 10000.0, **more: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta, **more}


_CONFIGS: dict[StateKind, Callable[[dict[str, Any]], PreTrainedConfig]] = {
    StateKind.QWEN3_NEXT: lambda base: transformers.Qwen3NextConfig(
        **base | _EXPERTS | _DELTA,
        shared_expert_intermediate_size=64,
        rope_parameters=_rope(partial_rotary_factor=0.5),
    ),
    StateKind.QWEN3_5: lambda base: transformers.Qwen3_5TextConfig(
        **base | _DELTA,
        rope_parameters=_rope(
            partial_rotary_factor=0.5, mrope_section=[4, 2, 2], mrope_interleaved=True
        ),
    ),
    StateKind.MELLUM: lambda base: transformers.MellumConfig(
        **base | _EXPERTS,
        sliding_window=WINDOW,
        layer_types=_WINDOWED,
        mlp_layer_types=["sparse"] * 4,
        rope_parameters={"full_attention": _rope(5e5), "sliding_attention": _rope()},
    ),
    StateKind.GPT_OSS: lambda base: transformers.GptOssConfig(
        **base,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"] * 2,
        rope_parameters=_rope(),
    ),
    StateKind.GEMMA3: lambda base: transformers.Gemma3TextConfig(
        **base | {"tie_word_embeddings": True},
        sliding_window=WINDOW,
        layer_types=_WINDOWED,
        query_pre_attn_scalar=32,
        rope_parameters={"full_attention": _rope(5e5), "sliding_attention": _rope()},
    ),
    StateKind.OLMO3: lambda base: transformers.Olmo3Config(
        **base, sliding_window=WINDOW, layer_types=_WINDOWED, rope_parameters=_rope(5e5)
    ),
    StateKind.NEMOTRON_H: lambda base: transformers.NemotronHConfig(
        **{name: value for name, value in base.items() if name != "num_hidden_layers"},
        layers_block_type=_BLOCKS,
        mamba_num_heads=4,
        mamba_head_dim=32,
        ssm_state_size=16,
        n_groups=2,
        chunk_size=64,
        expand=1,
        # transformers takes shorter steps for steps of this length; SGLang doesn't.
        time_step_min=1e-6,
    ),
    StateKind.GRANITE_HYBRID: lambda base: transformers.GraniteMoeHybridConfig(
        **base,
        layer_types=["mamba", "mamba", "attention", "mamba"],
        mamba_n_heads=8,
        mamba_d_head=32,
        mamba_d_state=16,
        mamba_n_groups=1,
        mamba_expand=2,
        mamba_chunk_size=64,
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=64,
        position_embedding_type="nope",
    ),
    StateKind.KIMI_LINEAR: lambda base: transformers.KimiLinearConfig(
        **base | {"num_key_value_heads": 4, "moe_intermediate_size": 64},
        kv_lora_rank=32,
        qk_rope_head_dim=16,
        qk_nope_head_dim=16,
        v_head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        linear_head_dim=16,
        linear_num_heads=4,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        mlp_layer_types=["sparse"] * 4,
    ),
    StateKind.LFM2: lambda base: transformers.Lfm2Config(
        **base, layer_types=["conv", "conv", "full_attention", "conv"], conv_L_cache=3
    ),
}
"""Models whose layers hold more, or less, than a row per token."""

_LEFT_OUT: dict[StateKind, dict[str, Any]] = {
    StateKind.QWEN3_NEXT: {"full_attention_interval": 4, "partial_rotary_factor": 0.5},
    StateKind.QWEN3_5: {
        "full_attention_interval": 4,
        "partial_rotary_factor": 0.5,
        "architectures": ["Qwen3_5ForCausalLM"],
    },
    StateKind.MELLUM: {"max_window_layers": 0, "architectures": ["MellumForCausalLM"]},
    StateKind.OLMO3: {"rope_theta": 5e5},
    StateKind.NEMOTRON_H: {"layers_block_type": _BLOCKS, "mamba_n_groups": 2},
    StateKind.KIMI_LINEAR: {
        "linear_attn_config": {
            "kda_layers": [1, 2, 3],
            "full_attn_layers": [4],
            "num_heads": 4,
            "head_dim": 16,
            "short_conv_kernel_size": 4,
        },
        "mla_use_nope": True,
        "first_k_dense_replace": 0,
    },
}
"""What SGLang reads from a configuration and transformers doesn't write."""


def _let_states_matter(model: Any) -> None:
    """Let recurrent states last for ten to thousands of tokens, and sinks take their part."""
    generator = torch.Generator().manual_seed(5)
    for name, weight in model.named_parameters():
        if name.endswith("A_log"):
            weight.data.copy_(torch.linspace(-7.5, -2.5, weight.numel()).view_as(weight))
        elif "conv1d" in name:
            weight.data.normal_(0.0, 0.4, generator=generator)
        elif name == "lm_head.weight":
            # Logits of this size magnify the rounding of fp32.
            weight.data.mul_(0.5)
        elif "embed_tokens" in name and model.config.tie_word_embeddings:
            # Otherwise each token answers with itself.
            weight.data.mul_(0.1)
        elif name.endswith("sinks"):
            # SGLang keeps them in 16 bits.
            weight.data.normal_(0.0, 2.0, generator=generator).copy_(weight.bfloat16())


def _add_keys(file: Path, keys: dict[str, Any]) -> None:
    config = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(config | keys, indent=2), encoding="utf-8")
