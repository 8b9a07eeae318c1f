"""A tokenizer with overlapping special tokens, texts for it, and the places of their tokens."""

from __future__ import annotations

from functools import cache

from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from leyline_proxy.render.tokens import Encoded

SPECIALS = ["<|im_start|>", "<|im_end|>", "<|im|>", "<tool_call>"]
SENTENCES = [
    "the quick brown fox",
    "def f(x):\n    return x + 1\n",
    "naïve café 漢字 🙂",
    "  a  b ",
]
texts = st.lists(
    st.one_of(
        st.sampled_from(SPECIALS + SENTENCES + ["<|im_", "|>", "\n", ""]), st.text(max_size=8)
    )
).map("".join)


@cache
def tokenizer_json(**flags: bool) -> str:
    """A small byte-level BPE tokenizer with special tokens, some a beginning of others."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES * 20, trainer)
    tokenizer.add_special_tokens([AddedToken(name, **flags) for name in SPECIALS])
    return str(tokenizer.to_str())


def check_places(encoded: Encoded, text: str, starts: list[int]) -> None:
    """Every character leads to the first token that begins there or later."""
    wanted = [
        next((i for i, start in enumerate(starts) if start >= char), len(starts))
        for char in range(len(text) + 1)
    ]
    assert encoded.tokens_at(range(len(text) + 1)) == wanted
