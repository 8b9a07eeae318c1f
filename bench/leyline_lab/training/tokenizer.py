"""The tokenizer of the trained models, and the text that it learns from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from random import Random

from tokenizers import Regex, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from leyline_lab.fidelity.recall_task import TOOLS, Mix, session
from leyline_lab.fidelity.recall_words import (
    FILES,
    GENERAL,
    KEYS,
    VALUES,
)
from leyline_lab.training.encoding import render
from leyline_replay.models.tiny import train_bpe

_WORDS = (*GENERAL, *KEYS, *VALUES, *FILES)


def general_line(rng: Random) -> str:
    """Return one line of English or code made of the word lists."""
    a, b, c, d, e = rng.choices(_WORDS, k=5)
    number = rng.randint(0, 9999)
    forms = (
        f"{a.capitalize()} {b} {c} {d}, and {e} {a} {b}.",
        f"def {a}_{b}({c}: str, {d}: int = {number}) -> None:",
        f"    return self.{a}.{b}({c}, {d}={e})",
        f"    if {a} is not None and {b}[{c}] == {number}:",
        f"class {a.capitalize()}{b.capitalize()}:",
        f'    """{a.capitalize()} the {b} of {c}."""',
        f"from {a}.{b} import {c}_{d}",
        f"    for {a} in {b}.{c}():",
        f"{number:04d}-{number % 12:02d} ERROR {a}.{b}: {c} {d} ({e})",
        f"/{a}/{b}/{c}.py:{number}: {d} {e}",
        f'{{"{a}": "{b}", "{c}": {number}, "{d}": ["{e}"]}}',
        f"- `{a}_{b}`: {c} {d} {e}",
        f"    {a} = {b}({c}) + {d}[{number}:]  # {e}",
        f'        assert {a} != {b}, f"{{{c}}} {d}"',
    )
    return rng.choice(forms)


def training_text(seed: int, *, sessions: int = 300, lines: int = 24_000) -> Iterator[str]:
    """Yield texts to train the tokenizer on; the same for the same seed."""
    rng = Random(seed)
    for word in _WORDS:
        # Each word at a line's start and within a line.
        yield "\n".join([word, f"`{word}` {word}= {word} {word.capitalize()}\n{word}="] * 10)
    for _ in range(sessions):
        turns = islice(session(rng, Mix()), 40)
        yield "".join(render(message) for turn in turns for message in turn)
        yield json.dumps(TOOLS[0])
    for _ in range(lines // 20):
        yield "\n".join(general_line(rng) for _ in range(20))


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
