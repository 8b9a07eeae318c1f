"""Draft models with random weights for EAGLE: their drafts are hardly ever accepted, which is no
matter for what is compared."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

FLAGS = ("--speculative-algorithm", "EAGLE", "--speculative-eagle-topk", "1")


def draft_flags(target: Path, folder: Path, steps: int) -> tuple[str, ...]:
    """Flags of a server of ``target``, a Llama, with a draft model that is written to ``folder``.

    Args:
        steps: tokens that are drafted at once.
    """
    write_draft(target, folder)
    counts = ("--speculative-num-steps", str(steps))
    verified = ("--speculative-num-draft-tokens", str(steps + 1))
    return (*FLAGS, "--speculative-draft-model-path", str(folder), *counts, *verified)


def write_draft(target: Path, folder: Path) -> None:
    """Write a draft model of one layer, which shares the target's embedding and head."""
    folder.mkdir(exist_ok=True)
    config = json.loads((target / "config.json").read_text())
    config |= {"architectures": ["LlamaForCausalLMEagle"], "num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    hidden, inner, width = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries = config["num_attention_heads"] * width
    keys = config["num_key_value_heads"] * width
    layer = "layers.0"
    shapes = {
        "embed_tokens.weight": (config["vocab_size"], hidden),
        "fc.weight": (hidden, 2 * hidden),
        "fc.bias": (hidden,),
        f"{layer}.self_attn.q_proj.weight": (queries, hidden),
        f"{layer}.self_attn.k_proj.weight": (keys, hidden),
        f"{layer}.self_attn.v_proj.weight": (keys, hidden),
        f"{layer}.self_attn.o_proj.weight": (hidden, queries),
        f"{layer}.mlp.gate_proj.weight": (inner, hidden),
        f"{layer}.mlp.up_proj.weight": (inner, hidden),
        f"{layer}.mlp.down_proj.weight": (hidden, inner),
        f"{layer}.post_attention_layernorm.weight": (hidden,),
    }
    generator = torch.Generator().manual_seed(20252)
    weights = {
        name: 0.1 * torch.randn(shape, generator=generator) for name, shape in shapes.items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
