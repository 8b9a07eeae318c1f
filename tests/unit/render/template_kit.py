"""Renderers and tokenizers for published templates, and recorded sessions for them."""

from __future__ import annotations

import gzip
import json
from itertools import islice
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from leyline_proxy.render import ChatRenderer

SENTENCES = ["def read(path):\n    return open(path).read()\n", "The quick fox: a, b and c.", "é…"]
SPECIAL = {"bos_token": "<bos>", "eos_token": "<eos>"}


def tokenizer_of(template: str) -> PreTrainedTokenizerFast:
    """A small byte-level tokenizer with the marks of chat templates."""
    marks = ["<|im_start|>", "<|im_end|>", "<|eot_id|>", "<bos>", "<eos>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=marks, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(SENTENCES * 4, trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL)
    wrapped.chat_template = template
    return wrapped


def renderer_of(tokenizer: PreTrainedTokenizerFast, template: str) -> ChatRenderer:
    """The proxy's renderer over that tokenizer."""
    return ChatRenderer(template, SPECIAL, tokenizer.backend_tokenizer.to_str())


def recorded(
    traces: Path, sessions: int, messages: int
) -> list[tuple[list[dict[str, Any]], list[dict[str, Any]] | None]]:
    """The beginnings of recorded sessions, as their clients sent them."""
    found: list[tuple[list[dict[str, Any]], list[dict[str, Any]] | None]] = []
    for path in sorted(traces.glob("sessions_*.jsonl.gz")):
        with gzip.open(path, "rt") as lines:
            for line in islice(lines, sessions):
                session = json.loads(line)
                found.append((session["messages"][:messages], session.get("tools") or None))
    return found
