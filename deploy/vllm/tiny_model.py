"""Write a tiny Llama with random weights, always the same: ``tiny_model.py FOLDER``.

The models that ship are MLA, for which vLLM has no prefix caching on a CPU. This one has learnt
nothing: it babbles.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from leyline_replay.models.trained import DEFAULT_MODEL_NAME, trained_model_dir

SEED = 20250


def main(folder: Path) -> None:
    """Write the model, with the tokenizer and the chat template of the one that ships."""
    shipped = trained_model_dir(DEFAULT_MODEL_NAME)
    assert shipped is not None  # noqa: S101 - it ships
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=131072,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=3,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    AutoTokenizer.from_pretrained(shipped).save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
