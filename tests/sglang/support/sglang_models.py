"""Tiny random models for a real SGLang server."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

from transformers import AutoTokenizer

from leyline_lab.stand_ins.random_models import RandomKind, build_model, random_config
from leyline_lab.stand_ins.state_models import StateKind, build_state_model
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


def build_sglang_model(model: SglangModel, folder: Path) -> Path:
    """Write a random float32 model with the shipped tokenizer to ``folder``, once.

    Returns:
        ``folder``, loadable by SGLang and by transformers.
    """
    if folder.is_dir():
        return folder
    if model in set(StateKind):
        return build_state_model(StateKind(model.value), folder)
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
