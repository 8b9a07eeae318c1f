"""Tiny models of several architectures with random weights and the shipped models' tokenizer.

An answer means nothing, but it depends on every token of the prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DeepseekV2Config,
    DeepseekV3Config,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3Config,
)

from leyline_replay.models.loader import LoadedModel, model_fingerprint
from leyline_replay.models.trained import DEFAULT_MODEL_NAME, trained_model_dir

MAX_CONTEXT = 131072
SEED = 20250


class RandomKind(StrEnum):
    """The architectures that :func:`build_random` makes."""

    MLA = "mla"
    """DeepSeek-V2 with dense layers: latent KV, interleaved rotary pairs."""
    MLA_YARN = "mla_yarn"
    """The same under YaRN scaling with an mscale that isn't 1."""
    MLA_V3 = "mla_v3"
    """DeepSeek-V3 with dense layers."""
    LLAMA = "llama"
    QWEN3 = "qwen3"


_MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
    # As wide as a query head: PyTorch's fused CPU attention takes only equal widths.
    "v_head_dim": 64,
    "first_k_dense_replace": 2,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_group": 1,
    "topk_group": 1,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": MAX_CONTEXT // 4,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 1.0,
}
_CONFIGS: dict[RandomKind, Callable[[dict[str, Any]], PreTrainedConfig]] = {
    RandomKind.MLA: lambda base: DeepseekV2Config(**base, **_MLA, topk_method="greedy"),
    RandomKind.MLA_YARN: lambda base: DeepseekV2Config(
        **base, **(_MLA | {"q_lora_rank": 48}), topk_method="greedy", rope_parameters=_YARN
    ),
    RandomKind.MLA_V3: lambda base: DeepseekV3Config(
        **base, **(_MLA | {"q_lora_rank": 48}), rope_interleave=True
    ),
    RandomKind.LLAMA: lambda base: LlamaConfig(**base, num_key_value_heads=2, head_dim=32),
    RandomKind.QWEN3: lambda base: Qwen3Config(**base, num_key_value_heads=2, head_dim=32),
}


RANDOM_MODELS: Final[Mapping[str, RandomKind]] = {
    "random-mla": RandomKind.MLA,
    "random-gqa": RandomKind.LLAMA,
}
"""Models that ``leyline eval`` measures beside those that ship: latent KV, and two heads of keys
for four of queries."""


def random_model(name: str) -> LoadedModel:
    """Return one of ``RANDOM_MODELS`` in fp32 on the CPU, with the shipped models' tokenizer."""
    model = build_model(random_config(RANDOM_MODELS[name])).requires_grad_(False)
    tokenizer = AutoTokenizer.from_pretrained(trained_model_dir(DEFAULT_MODEL_NAME))
    with TemporaryDirectory() as folder:  # the loader's digest is of a folder
        model.config.save_pretrained(folder)
        return LoadedModel(name, model, tokenizer, model_fingerprint(model, Path(folder)), "")


def build_random(
    kind: RandomKind | str, directory: Path, *, seed: int = SEED, **shape: int
) -> Path:
    """Write a random model and the shipped tokenizer to ``directory``; returns the directory.

    ``shape`` are entries of the configuration, where the usual ones are too large.
    """
    shipped = trained_model_dir(DEFAULT_MODEL_NAME)
    assert shipped is not None
    AutoTokenizer.from_pretrained(shipped).save_pretrained(directory)
    build_model(random_config(kind, **shape), seed=seed).save_pretrained(directory)
    return directory


def build_model(config: PreTrainedConfig, *, seed: int = SEED) -> Any:
    """Return an fp32 model of ``config`` whose weights depend only on ``seed``.

    The init is wider than usual, so that logits lie far from ties and attention matters.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                wide = "embed_tokens" in name or "lm_head" in name
                parameter.normal_(0.0, 0.5 if wide else 0.1, generator=generator)
            elif "norm" in name:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(1 + 0.1 * noise)
    return model.eval()


def random_config(kind: RandomKind | str, **shape: int) -> PreTrainedConfig:
    """Return the configuration of a tiny model that fits the shipped tokenizer."""
    base: dict[str, Any] = {
        "vocab_size": 4096,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": MAX_CONTEXT,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 3,
        "tie_word_embeddings": False,
    }
    return _CONFIGS[RandomKind(kind)](base | shape)
