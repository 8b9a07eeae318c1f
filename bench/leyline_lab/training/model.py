"""The models' architecture, and a forward for training that needs no mask if it is causal."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, DeepseekV2Config

LAYERS = 4
_EQUAL = 0.6
_DISTANCES = (1, 2, 4, 7)
"""Initial distances, in tokens, that the first layer's heads look back; 7 is from an answer to its
question's last word."""
_SHARPNESS = 6.0  # of a query's or key's constant part, per pair of rotary dimensions
_PAIRS = 5  # the fastest turning ones


def model_config(*, vocab_size: int, eos_token_id: int, max_context: int) -> DeepseekV2Config:
    """Return a DeepSeek-V2 of dense layers only, with latent KV of 64 dims, a rotary key of 32."""
    return DeepseekV2Config(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=None,
        kv_lora_rank=64,
        qk_rope_head_dim=32,
        qk_nope_head_dim=32,
        v_head_dim=64,  # as wide as a query head: PyTorch's fused CPU attention needs it
        first_k_dense_replace=LAYERS,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        n_group=1,
        topk_group=1,
        topk_method="greedy",
        max_position_embeddings=max_context,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=eos_token_id,
        pad_token_id=3,
        tie_word_embeddings=True,
    )


def new_model(config: DeepseekV2Config, *, seed: int) -> Any:
    """Return an fp32 model whose weights depend only on the seed.

    The heads of the first layer start by looking back at fixed distances. Small models learn this
    slowly, and without it can't find a token by the ones before it. For this, one dimension of the
    embeddings starts equal for all tokens, in place of a bias, which the architecture lacks. The
    tied head isn't affected, because the dimension shifts all logits alike.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="sdpa"
        )
    with torch.no_grad():
        _look_back(model)
    return model


def _look_back(model: Any) -> None:
    config, base = model.config, model.model
    base.embed_tokens.weight[:, 0] = _EQUAL
    attention = base.layers[0].self_attn
    # The equal dimension as the first layer sees it, after the norm.
    typical = base.embed_tokens.weight.pow(2).mean(-1).sqrt().mean()
    gain = _SHARPNESS / (_EQUAL / typical)
    width = config.qk_rope_head_dim
    angles = base.rotary_emb.inv_freq[:_PAIRS, None] * torch.tensor(_DISTANCES)
    # Pairs are interleaved: (real, imaginary), (real, imaginary), ...
    keys = attention.kv_a_proj_with_mqa.weight[-width:, 0]
    keys[: 2 * _PAIRS : 2] = gain
    queries = attention.q_proj.weight.view(len(_DISTANCES), -1, config.hidden_size)
    for head, angle in enumerate(angles.T):
        rotary = queries[head, -width:, 0]
        rotary[: 2 * _PAIRS : 2] = gain * angle.cos()
        rotary[1 : 2 * _PAIRS : 2] = -gain * angle.sin()


def hidden_states(
    model: Any, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """Return the input of the model's head, [B, T, hidden].

    The model's own forward isn't used, because it takes a jump in the positions for the seam of two
    packed sequences, and makes a mask of [T, T] when the fused attention needs none.

    Args:
        model: a DeepSeek-V2 causal LM.
        ids: [B, T], int64.
        positions: [B, T], int64.
        mask: [B, 1, T, T], bool, True for seen tokens; None for a causal mask.
    """
    base = model.model
    hidden = base.embed_tokens(ids)
    rotary = base.rotary_emb(hidden, position_ids=positions)
    for layer in base.layers:
        hidden = layer(hidden, attention_mask=mask, position_embeddings=rotary)
    normed: torch.Tensor = base.norm(hidden)
    return normed
