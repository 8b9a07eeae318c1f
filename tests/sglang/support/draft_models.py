"""Draft models with random weights for EAGLE: their drafts are hardly ever accepted, which is no
matter for what is compared."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from sglang_models import shipped_model
from transformers import AutoTokenizer

from leyline_lab.stand_ins.random_models import RandomKind, build_model, random_config
from leyline_replay.models.tiny import add_sglang_keys

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


def write_eagle3(target: Path, folder: Path) -> None:
    """Write a draft model of EAGLE3's kind: it reads what goes into both of the target's layers."""
    folder.mkdir(exist_ok=True)
    config = json.loads((target / "config.json").read_text())
    hidden, inner, width = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    # SGLang reads the layer after the named one.
    read = list(range(-1, config["num_hidden_layers"] - 1))
    config |= {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1}
    config |= {"eagle_config": {"eagle_aux_hidden_state_layer_ids": read}, "draft_vocab_size": None}
    (folder / "config.json").write_text(json.dumps(config))
    layer = "layers.0"
    norms = ("norm", *(f"{layer}.{name}norm" for name in ("input_layer", "hidden_")))
    shapes = {
        "fc.weight": (hidden, len(read) * hidden),
        f"{layer}.self_attn.q_proj.weight": (config["num_attention_heads"] * width, 2 * hidden),
        f"{layer}.self_attn.k_proj.weight": (config["num_key_value_heads"] * width, 2 * hidden),
        f"{layer}.self_attn.v_proj.weight": (config["num_key_value_heads"] * width, 2 * hidden),
        f"{layer}.self_attn.o_proj.weight": (hidden, config["num_attention_heads"] * width),
        f"{layer}.mlp.gate_proj.weight": (inner, hidden),
        f"{layer}.mlp.up_proj.weight": (inner, hidden),
        f"{layer}.mlp.down_proj.weight": (hidden, inner),
    }
    generator = torch.Generator().manual_seed(20254)
    weights = {
        name: 0.1 * torch.randn(shape, generator=generator) for name, shape in shapes.items()
    }
    weights |= {f"{name}.weight": torch.ones(hidden) for name in norms}
    weights[f"{layer}.post_attention_layernorm.weight"] = torch.ones(hidden)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def write_mtp(folder: Path) -> Path:
    """Write a DeepSeek-V3 with a layer for multi-token prediction (MTP); gives the folder."""
    config = random_config(RandomKind.MLA_V3, num_hidden_layers=3)
    model = build_model(config)
    layer, hidden = "model.layers.2", config.hidden_size
    weights = {name: weight.contiguous() for name, weight in model.state_dict().items()}
    weights |= _split_experts(weights, f"{layer}.mlp.experts", config.moe_intermediate_size)
    generator = torch.Generator().manual_seed(20253)
    weights[f"{layer}.eh_proj.weight"] = 0.1 * torch.randn(hidden, 2 * hidden, generator=generator)
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        weights[f"{layer}.{norm}.weight"] = torch.ones(hidden)
    for name, shared in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
        weights[f"{layer}.{name}.weight"] = weights[f"{shared}.weight"].clone()
    config.save_pretrained(folder)
    add_sglang_keys(folder / "config.json")
    written = json.loads((folder / "config.json").read_text()) | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "num_hidden_layers": 2,
        "num_nextn_predict_layers": 1,
        "moe_layer_freq": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    }
    (folder / "config.json").write_text(json.dumps(written))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    AutoTokenizer.from_pretrained(shipped_model()).save_pretrained(folder)
    return folder


def _split_experts(
    weights: dict[str, torch.Tensor], name: str, inner: int
) -> dict[str, torch.Tensor]:
    """Take the experts' joined weights out, and return them as checkpoints have them."""
    both, down = weights.pop(f"{name}.gate_up_proj"), weights.pop(f"{name}.down_proj")
    found = {}
    for expert in range(len(both)):
        found[f"{name}.{expert}.gate_proj.weight"] = both[expert, :inner].contiguous()
        found[f"{name}.{expert}.up_proj.weight"] = both[expert, inner:].contiguous()
        found[f"{name}.{expert}.down_proj.weight"] = down[expert].contiguous()
    return found
