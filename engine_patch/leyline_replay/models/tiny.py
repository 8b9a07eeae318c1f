"""Parts of making a tiny model: a tokenizer for the chat template, and keys for SGLang."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.pre_tokenizers import PreTokenizer
from transformers import PreTrainedTokenizerFast

from leyline_replay.models.tiny_chat_template import CHAT_TEMPLATE, TOOL_CALL_CLOSE, TOOL_CALL_OPEN

_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")


def train_bpe(
    pieces: PreTokenizer, texts: Iterable[str], *, vocab_size: int, max_context: int
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer that knows the tiny models' chat template.

    Args:
        pieces: cuts texts into pieces that no token crosses; ends in bytes.
        texts: to train on.
        vocab_size: special tokens and tool tags included.
        max_context: maximum number of tokens that the model takes.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pieces
    tokenizer.decoder = decoders.ByteLevel()
    tool_tags = [
        AddedToken(tag, special=False, normalized=False)
        for tag in (TOOL_CALL_OPEN, TOOL_CALL_CLOSE)
    ]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(tool_tags),
        special_tokens=list(_SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens(tool_tags)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",  # noqa: S106 - a token of the vocabulary
        pad_token="<|pad|>",  # noqa: S106
        additional_special_tokens=["<|endoftext|>", "<|im_start|>"],
        clean_up_tokenization_spaces=False,
        model_max_length=max_context,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def add_sglang_keys(config_file: Path) -> None:
    """Add keys that SGLang reads from DeepSeek configurations and transformers 5 leaves out."""
    config = cast(dict[str, Any], json.loads(config_file.read_text(encoding="utf-8")))
    if config["model_type"] == "deepseek_v2":
        config |= {"moe_layer_freq": 1, "scoring_func": "softmax", "ep_size": 1, "seq_aux": True}
        config["aux_loss_alpha"] = 0.001
        config_file.write_text(json.dumps(config, indent=2), encoding="utf-8")
