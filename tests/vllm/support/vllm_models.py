"""Tiny random models for a real vLLM server."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer

from leyline_lab.stand_ins.random_models import RandomKind, build_model, random_config
from leyline_replay.models.trained import DEFAULT_MODEL_NAME, trained_model_dir


def build_vllm_model(folder: Path, kind: RandomKind = RandomKind.LLAMA) -> Path:
    """Write a random float32 model with the shipped tokenizer and template to ``folder``, once.

    Returns:
        ``folder``, loadable by vLLM and by transformers.
    """
    if not folder.is_dir():
        build_model(random_config(kind)).save_pretrained(folder)
        shipped = trained_model_dir(DEFAULT_MODEL_NAME)
        assert shipped is not None
        AutoTokenizer.from_pretrained(shipped).save_pretrained(folder)
    return folder
