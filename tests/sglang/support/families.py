"""Small models of current families with random weights, as checkpoints that SGLang loads."""

from __future__ import annotations

import json
from pathlib import Path

from sglang_models import shipped_model
from transformers import AutoConfig, AutoTokenizer

from leyline_lab.sglang_models.shrunken import small_config
from leyline_lab.stand_ins.random_models import build_model

_VOCABULARY = 4096
"""The shipped tokenizer's."""
_CONTEXT = 16384
_LAYERS = 2


def build_family(name: str, folder: Path) -> Path:
    """Write a random float32 model of a family's text part, with the shipped tokenizer.

    Returns:
        ``folder``, loadable by SGLang and by transformers.
    """
    small = small_config(name)
    text = dict(small.get("text_config", small))
    text |= {"vocab_size": _VOCABULARY, "max_position_embeddings": _CONTEXT}
    text |= {key: None for key in ("bos_token_id", "quantization_config") if key in text}
    kinds = text.get("layer_types") or []
    if len(set(kinds)) == _LAYERS:
        # One of each kind: rounding grows with the number of layers.
        text |= {"layer_types": kinds[-_LAYERS:], "num_hidden_layers": _LAYERS}
    if text.get("sliding_window") and text["model_type"] != "cohere2":
        # So that it matters in a short prompt. SGLang's Cohere 2 sees one token more than
        # transformers'.
        text["sliding_window"] = 64
    if "attention_multiplier" in text:
        # Granite's own makes attention of random weights nearly uniform, and hides wrong keys.
        text["attention_multiplier"] = text["hidden_size"] ** -0.5
        # So does what little of it is added to an embedding of many times its size.
        text["residual_multiplier"] = 1.0
    kind = text.pop("model_type")
    model = build_model(AutoConfig.for_model(kind, **text))
    for path, weight in model.named_parameters():
        if "q_b_proj" in path:
            # Queries of so many dimensions give scores that magnify the rounding of fp32.
            weight.data.mul_(0.5)
    model.save_pretrained(folder)
    saved = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    # What transformers' class doesn't know, SGLang's may need.
    saved = {key: value for key, value in text.items() if key not in saved} | saved
    if "text_config" not in small:
        # SGLang and transformers may spell a class differently.
        saved["architectures"] = small["architectures"]
    (folder / "config.json").write_text(json.dumps(saved, indent=2), encoding="utf-8")
    AutoTokenizer.from_pretrained(shipped_model()).save_pretrained(folder)
    return folder
