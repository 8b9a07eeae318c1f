"""Real configurations of models, made small: fewer layers and widths, everything about keys kept.

``tests/fixtures/models`` has configurations as they were published. A small one keeps the class,
the widths of heads, latents and rotary bands, all rope parameters, norms of queries and keys, and
the kinds of layers in their order.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..harness.machine import CHECKOUT

CONFIGS = CHECKOUT / "tests" / "fixtures" / "models"
_LAYERS = 2
_KEY_HEADS = 2
_GROUP = 2
"""Query heads per key head, at most."""
_EXPERTS = 4
_SMALL: Mapping[str, int] = {
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "intermediate_size_mlp": 64,
    "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "expert_hidden_dim": 32,
    "share_expert_dim": 32,
    "share_expert_dims": 32,
    "routed_expert_hidden_size": 64,
    "dense_intermediate_size": 64,
    "dense_mlp_idx": 1,
    "lightning_nh": 4,
    "lightning_nkv": 4,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "vocab_size": 512,
    "unpadded_vocab_size": 512,
    "q_lora_rank": 48,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_top_k": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "top_k": 2,
    "top_k_experts": 2,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "num_shared_expert": 1,
    "moe_num_shared_experts": 1,
    "num_nextn_predict_layers": 0,
    "num_mtp_layers": 0,
    "mtp_num_layers": 0,
    "first_k_dense_replace": 1,
    "moe_layer_start_index": 1,
}
"""Widths that no key depends on, where a configuration has them."""
_EXPERT_COUNTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
_KINDS_OF_LAYERS = (
    "layer_types",
    "attn_type_list",
    "mixer_types",
    "hybrid_layer_pattern",
    "hybrid_override_pattern",
)
"""Entries with the kind of every layer."""
_PERIODS = ("sliding_window_pattern", "layer_group_size", "full_attention_interval")
"""Entries with the number of layers after which the kinds begin again."""
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id", "video_token_id")
_VISION: Mapping[str, int] = {
    "num_hidden_layers": 1,
    "depth": 1,
    "layers": 1,
    "hidden_size": 64,
    "width": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_heads": 2,
    "heads": 2,
    "head_dim": 32,
    "patch_size": 14,
    "image_size": 28,
    "vt_num_hidden_layers": 1,
    "vt_hidden_size": 64,
    "vt_intermediate_size": 64,
    "vt_num_attention_heads": 2,
    "mm_hidden_size": 64,
}
"""Widths of the part for images, under the names that wrappers give them."""


def names() -> list[str]:
    """Return the families of which a configuration is there."""
    return sorted(path.stem for path in CONFIGS.glob("*.json"))


def small_config(name: str) -> dict[str, Any]:
    """Return the small configuration of a family."""
    config: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text(encoding="utf-8"))
    return shrink(config) if "architectures" in config else _shrink_mistral(config)


def write_small(name: str, folder: Path, dtype: str) -> Path:
    """Write a family's small configuration to a folder; returns the folder.

    Some layers of SGLang's have the dtype of the configuration, whatever the server's.
    Mistral's own format has another file name, and SGLang knows it by the folder's name.
    """
    folder.mkdir(parents=True, exist_ok=True)
    small = _in_dtype(small_config(name), dtype)
    file = "config.json" if "architectures" in small else "params.json"
    (folder / file).write_text(json.dumps(small, indent=2), encoding="utf-8")
    return folder


def _in_dtype(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    changed = {k: _in_dtype(v, dtype) if isinstance(v, dict) else v for k, v in config.items()}
    return changed | {key: dtype for key in ("dtype", "torch_dtype") if key in config}


def _shrink_mistral(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same in the names of Mistral's own format."""
    widths = {"dim": 128, "n_layers": _LAYERS, "hidden_dim": 64, "n_heads": 4, "n_kv_heads": 4}
    experts = {"expert_hidden_dim": 32, "num_experts": _EXPERTS, "num_experts_per_tok": 2}
    small = dict(params) | widths | {"vocab_size": 512, "q_lora_rank": 48}
    return small | {"moe": dict(params["moe"]) | experts}


def shrink(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with fewer layers and widths; a wrapper's text part is made small."""
    small = {key: value for key, value in config.items() if key != "quantization_config"}
    for part in ("text_config", "llm_config", "language_config"):
        if isinstance(small.get(part), dict):
            small[part] = _text(small[part])
    if "text_config" in small:
        small["vision_config"] = (small.get("vision_config") or {}) | dict(_VISION)
    return _text(small) if "num_hidden_layers" in small else small


def _text(config: Mapping[str, Any]) -> dict[str, Any]:
    small = dict(config)
    small.pop("quantization_config", None)
    layers = int(config["num_hidden_layers"])
    kept = min(layers, max(_LAYERS, _layers_of_each_kind(config)))
    small |= {
        key: value[:kept]
        for key, value in config.items()
        if isinstance(value, (list, str)) and len(value) == layers
    }
    small["num_hidden_layers"] = kept
    if linear := config.get("linear_attn_config"):
        small["linear_attn_config"] = _linear(linear, kept)
    if other := config.get("attention_other_setting"):
        heads = {"num_attention_heads": _KEY_HEADS * _GROUP, "num_attention_groups": _KEY_HEADS}
        small["attention_other_setting"] = dict(other) | heads
    if config.get("moe_layers_enum"):
        small["moe_layers_enum"] = str(kept - 1)
    if local := config.get("local_layer_ids"):
        small["local_layer_ids"] = [layer for layer in local if layer < kept]
    small |= {key: value for key, value in _SMALL.items() if config.get(key) is not None}
    small |= {key: _EXPERTS for key in _EXPERT_COUNTS if config.get(key)}
    small |= {key: 1 for key in _TOKENS if config.get(key) is not None}
    return small | _heads(config)


def _linear(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Return Kimi's entry for its recurrent layers; layers are numbered from one."""
    numbers = ("kda_layers", "full_attn_layers")
    kept = {name: [n for n in config[name] if n <= layers] for name in numbers}
    return dict(config) | kept | {"num_heads": 2 * _KEY_HEADS}


def _layers_of_each_kind(config: Mapping[str, Any]) -> int:
    """Return the number of first layers among which every kind of layer occurs."""
    for name in _KINDS_OF_LAYERS:
        if kinds := config.get(name):
            return int(max(kinds.index(kind) + 1 for kind in set(kinds)))
    if linear := config.get("linear_attn_config"):
        # Numbered from one.
        return int(max(min(linear["kda_layers"]), min(linear["full_attn_layers"])))
    if local := config.get("local_layer_ids"):
        return min(set(range(len(local) + 1)) - set(local)) + 1
    # The last of so many layers sees everything.
    return max((int(config.get(name) or 0) for name in _PERIODS), default=0)


def _heads(config: Mapping[str, Any]) -> dict[str, Any]:
    heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
    key_heads = int(config.get("num_key_value_heads") or heads)
    width = int(config.get("head_dim") or hidden // heads)
    if config.get("kv_lora_rank"):
        return {"num_attention_heads": 4, "num_key_value_heads": 4, "hidden_size": 128}
    new_key_heads = min(key_heads, _KEY_HEADS)
    new_heads = new_key_heads * min(heads // key_heads, _GROUP)
    small = {"num_attention_heads": new_heads, "hidden_size": new_heads * width}
    names = ("num_key_value_heads", "num_attention_groups")
    return small | {name: new_key_heads for name in names if name in config}
