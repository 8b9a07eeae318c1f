"""The byte-level BPE tokenizer that both models share."""

from __future__ import annotations

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from leyline_engine.replay.models.tiny_chat_template import (
    CHAT_TEMPLATE,
    TOOL_CALL_CLOSE,
    TOOL_CALL_OPEN,
)
from training.text import training_text

VOCAB_SIZE = 4096
_PIECES = (
    r"'s|'t|'re|'ve|'m|'ll|'d"
    r"| ?\p{L}+=?"  # a word; an assignment's sign belongs to it
    r"|\d{1,2}"  # numbers in pairs of digits
    r"| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+|\p{N}"
)
"""What tokens never reach across, as in GPT-2 but for assignments and numbers."""
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")


def train_tokenizer(seed: int, *, max_context: int) -> PreTrainedTokenizerFast:
    """Train the tokenizer on made-up text; any text survives encoding and decoding unchanged.

    Numbers are cut into pairs of digits, so that any number is made of few tokens and each pair
    is common enough to be learnt. ``name=`` is one token, so that a setting's value stands right
    behind its name: looking one token back is learnt sooner than looking two back.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tool_tags = [
        AddedToken(tag, special=False, normalized=False)
        for tag in (TOOL_CALL_OPEN, TOOL_CALL_CLOSE)
    ]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(tool_tags),
        special_tokens=list(_SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(training_text(seed), trainer)
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
