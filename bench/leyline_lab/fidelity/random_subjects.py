"""Tiny models with random weights: answers mean nothing, but depend on every token of a prompt."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DeepseekV2Config, LlamaConfig

from leyline_replay.models.loader import LoadedModel, model_fingerprint
from leyline_replay.models.trained import DEFAULT_MODEL_NAME, trained_model_dir

_SEED = 20250
_SHAPE: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 131072,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 3,
    "tie_word_embeddings": False,
}
_MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 64,
    "first_k_dense_replace": 2,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
}

RANDOM_MODELS = ("random-mla", "random-gqa")
"""DeepSeek-V2 with latent KV, and Llama with two heads of keys for four of queries."""


def random_model(name: str) -> LoadedModel:
    """Return one of ``RANDOM_MODELS`` in fp32 on the CPU, with the shipped models' tokenizer.

    Its weights depend on a fixed seed alone. They are wider than usual, so that logits lie far
    from ties and attention matters.
    """
    config = (
        DeepseekV2Config(**_SHAPE, **_MLA)
        if name == "random-mla"
        else LlamaConfig(**_SHAPE, num_key_value_heads=2, head_dim=32)
    )
    folder = trained_model_dir(DEFAULT_MODEL_NAME)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = _with_random_weights(config)
    return LoadedModel(name, model, tokenizer, _fingerprint(model), "")


def _with_random_weights(config: Any) -> Any:
    generator = torch.Generator().manual_seed(_SEED)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                wide = "embed_tokens" in name or "lm_head" in name
                parameter.normal_(0.0, 0.5 if wide else 0.1, generator=generator)
            elif "norm" in name:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(1 + 0.1 * noise)
    return model.requires_grad_(False).eval()


def _fingerprint(model: Any) -> str:
    """Return the digest that the loader gives to a folder with this model's configuration."""
    with TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        return model_fingerprint(model, Path(folder))
