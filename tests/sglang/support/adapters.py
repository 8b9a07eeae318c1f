"""Random LoRA adapters of the tests' own, and models with their weights merged in."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

RANK, ALPHA = 8, 16
_TARGETS = ("q_proj", "k_proj", "v_proj")
_SIZE = 0.2


def build_adapter(base: Path, folder: Path, seed: int) -> Path:
    """Write a random adapter of ``base``'s attention to ``folder``, as PEFT writes one.

    Returns:
        A folder with the model that the adapter makes of ``base``.
    """
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if not name.endswith(_TARGETS):
            continue
        down = _SIZE * torch.randn(RANK, module.in_features, generator=generator)
        up = _SIZE * torch.randn(module.out_features, RANK, generator=generator)
        tensors[f"base_model.model.{name}.lora_A.weight"] = down
        tensors[f"base_model.model.{name}.lora_B.weight"] = up
        module.weight.data += ALPHA / RANK * up @ down
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "target_modules": list(_TARGETS),
        "r": RANK,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    merged = folder / "merged"
    model.save_pretrained(merged)
    AutoTokenizer.from_pretrained(base).save_pretrained(merged)
    return merged
