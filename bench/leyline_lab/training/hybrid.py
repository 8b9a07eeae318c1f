"""Train a tiny hybrid of recurrent and attention layers on the recall task in single words.

``python -m leyline_lab.training.hybrid --out out/hybrid`` takes about ten minutes on a core.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3NextConfig

from leyline_lab.fidelity.word_task import ASK, END, PAD, UNKNOWN, VOCABULARY, session
from leyline_lab.training.train import optimizers_of

CHAT_TEMPLATE = (
    "{%- for m in messages -%}"
    "{{ {'tool': '<tool> ', 'user': '<ask> '}.get(m.role, '' if m.role == 'assistant' else "
    "'<text> ') + m.content + (' ' if m.role == 'user' else ' <end> ') }}"
    "{%- endfor -%}"
)
_TOKENS = 2048
"""Tokens of a step."""
_TWO = ("num_key_value_heads", "linear_num_key_heads", "linear_num_value_heads")
_WIDE = ("head_dim", "linear_key_head_dim", "linear_value_head_dim")
_LAYERS = ("linear_attention", "linear_attention", "full_attention", "linear_attention")


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of the training: rows of a length, of so many of the task's settings."""

    steps: int
    length: int
    keys: int
    rate: float
    falls: bool = False
    """True if the learning rate falls to a twentieth, along a cosine."""


STAGES = (
    Stage(220, 32, 8, 4e-3),
    Stage(120, 64, 16, 3e-3),
    Stage(160, 64, 32, 3e-3),
    Stage(150, 128, 32, 3e-3),
    Stage(200, 224, 32, 2e-3, falls=True),
)
"""Few settings first: recall of few is learnt soon, and spreads."""


def new_model(seed: int) -> Any:
    """Return an fp32 Qwen3-Next of a quarter of a million parameters, three of four layers GDN."""
    rotary = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
    config = Qwen3NextConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=len(_LAYERS),
        layer_types=list(_LAYERS),
        num_attention_heads=4,
        **dict.fromkeys(_TWO, 2),
        **dict.fromkeys(_WIDE, 32),
        mlp_only_layers=list(range(len(_LAYERS))),
        num_experts=0,
        rope_parameters=rotary,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        pad_token_id=VOCABULARY.index(PAD),
        bos_token_id=None,
        eos_token_id=VOCABULARY.index(END),
        initializer_range=0.05,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").float()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("A_log"):  # heads that forget nothing, and heads that forget soon
                weight.copy_(torch.linspace(-6, 0, weight.numel()))
    return model


def new_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer of the task, a token per word, with its chat template."""
    words = {word: index for index, word in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD)
    fast.chat_template = CHAT_TEMPLATE
    return fast


def loss_and_rates(model: Any, rng: Random, stage: Stage) -> tuple[torch.Tensor, dict[str, float]]:
    """Return the mean loss of a batch's answers, and the shares of right ones."""
    index = {word: place for place, word in enumerate(VOCABULARY)}
    rows = [session(rng, stage.length, keys=stage.keys) for _ in range(_TOKENS // stage.length)]
    ids = torch.tensor([[index[word] for word in row] for row in rows])
    answers = torch.zeros_like(ids, dtype=torch.bool)
    answers[:, 2:] = ids[:, :-2] == index[ASK]
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1][answers[:, 1:]]
    wanted = ids[answers]
    right, known = logits.argmax(-1) == wanted, wanted != index[UNKNOWN]
    rates = {"known": right[known], "unknown": right[~known]}
    shares = {name: round(float(found.float().mean()), 4) for name, found in rates.items()}
    return torch.nn.functional.cross_entropy(logits, wanted), shares


def train(model: Any, out: Path, *, seed: int, stages: tuple[Stage, ...] = STAGES) -> None:
    """Train in place, and save after each stage, with the rates on the way."""
    rng, curve = Random(seed), list[dict[str, float]]()
    for stage in stages:
        optimizers = optimizers_of(model, stage.rate, 0.02)
        for step in range(stage.steps):
            fall = 0.5 * (1 + math.cos(math.pi * step / stage.steps)) if stage.falls else 1.0
            rate = stage.rate * min(1.0, (step + 1) / 50) * (0.05 + 0.95 * fall)
            for optimizer, part in zip(optimizers, (1.0, 0.5), strict=True):
                for group in optimizer.param_groups:
                    group["lr"] = part * rate
            loss, rates = loss_and_rates(model, rng, stage)
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            if (step + 1) % 50 == 0:
                curve.append({"length": stage.length, "step": step + 1, **rates})
                print(json.dumps(curve[-1] | {"loss": round(loss.item(), 3)}), flush=True)
        model.save_pretrained(out)
        (out / "training.json").write_text(json.dumps(curve, indent=1), encoding="utf-8")


def main() -> None:
    """Train, save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the model")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(1)
    model = new_model(given.seed)
    new_tokenizer().save_pretrained(given.out)
    train(model.train(), given.out, seed=given.seed)


if __name__ == "__main__":
    main()
