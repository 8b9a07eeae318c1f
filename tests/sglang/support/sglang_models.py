"""Tiny random models for a real SGLang server."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

from transformers import AutoTokenizer

from leyline_lab.stand_ins.random_models import RandomKind, build_model, random_config
from leyline_replay.models.tiny import add_sglang_keys
from leyline_replay.models.trained import DEFAULT_MODEL_NAME, trained_model_dir

_DENSE_LAYERS_OF_MOE = 1


class SglangModel(StrEnum):
    """The models that :func:`build_sglang_model` makes."""

    MLA = "mla"
    """DeepSeek-V2, dense layers: latent KV, interleaved rotary pairs."""
    MLA_MOE = "mla_moe"
    """The same with a mixture of experts after the first layer."""
    MLA_YARN = "mla_yarn"
    """The dense one under YaRN scaling with an mscale that isn't 1."""
    LLAMA = "llama"
    """Grouped queries, half-split rotary pairs."""
    QWEN3 = "qwen3"
    """The same with normed queries and keys."""


def build_sglang_model(model: SglangModel, folder: Path) -> Path:
    """Write a random float32 model with the shipped tokenizer to ``folder``, once.

    Returns:
        ``folder``, loadable by SGLang and by transformers.
    """
    if folder.is_dir():
        return folder
    moe = model is SglangModel.MLA_MOE
    config = random_config(RandomKind.MLA if moe else RandomKind(model.value))
    if moe:
        config.first_k_dense_replace = _DENSE_LAYERS_OF_MOE
    build_model(config).save_pretrained(folder)
    add_sglang_keys(folder / "config.json")
    AutoTokenizer.from_pretrained(shipped_model()).save_pretrained(folder)
    return folder


def shipped_model() -> Path:
    """Folder of the trained model that ships with the package."""
    folder = trained_model_dir(DEFAULT_MODEL_NAME)
    assert folder is not None
    return folder
