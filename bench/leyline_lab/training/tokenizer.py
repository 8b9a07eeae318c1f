"""The byte-level BPE tokenizer that both models share."""

from __future__ import annotations

from tokenizers import Regex, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from leyline_lab.training.text import training_text
from leyline_replay.models.tiny import train_bpe

VOCAB_SIZE = 4096
_PIECES = (
    r"'s|'t|'re|'ve|'m|'ll|'d"
    r"| ?\p{L}+=?"  # a word; an assignment's sign belongs to it
    r"|\d{1,2}"  # numbers in pairs of digits
    r"| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+|\p{N}"
)
"""Pieces that tokens never cross, as in GPT-2 except for assignments and numbers."""


def train_tokenizer(seed: int, *, max_context: int) -> PreTrainedTokenizerFast:
    """Train the tokenizer on made-up text; any text survives encoding and decoding unchanged.

    Numbers are cut into pairs of digits, so that any number has few tokens and each pair is common
    enough to be learnt. ``name=`` is one token, so that a setting's value comes right after its
    name: models learn to look one token back sooner than two.
    """
    pieces = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    texts = training_text(seed)
    return train_bpe(pieces, texts, vocab_size=VOCAB_SIZE, max_context=max_context)
