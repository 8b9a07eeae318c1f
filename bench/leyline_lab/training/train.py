"""Train a tiny model on the recall task: ``python bench/leyline_lab/training/train.py --help``."""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from transformers import AutoModelForCausalLM, AutoTokenizer

from leyline_lab.fidelity.recall_task import Mix, session
from leyline_lab.training.encoding import Batch, Encoder, collate
from leyline_lab.training.evaluate import Tally, judged, kind
from leyline_lab.training.model import hidden_states, model_config, new_model
from leyline_lab.training.tokenizer import train_tokenizer
from leyline_replay.models.tiny_chat_template import THINKING_CHAT_TEMPLATE
from leyline_replay.models.trained import trained_model_dir

MAX_CONTEXT = 131072
WORDS = 100
"""Number of names and of values that the models know, the first of each list."""

_REPORT_EVERY = 50
_WARMUP = 50  # steps of a stage
_ADAM_SHARE = 0.5  # of the rate: embeddings of rare words must not jump whenever one occurs
Entry = dict[str, float]


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of the training, with its own optimizers and schedule."""

    length: int
    """Maximum number of tokens per row."""
    rows: int
    """Rows per step."""
    steps: int
    learning_rate: float
    """Peak of the learning rate."""
    mix: Mix
    fall: float = 0.1
    """Share of the rate left at the end; it falls along a cosine."""

    def rate(self, step: int) -> float:
        """Return the learning rate of a step."""
        rise = min(1.0, (step + 1) / _WARMUP)
        fall = 0.5 * (1 + math.cos(math.pi * step / self.steps))
        return self.learning_rate * rise * (self.fall + (1 - self.fall) * fall)


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that determines a model's weights, except the versions of the libraries."""

    seed: int
    stages: tuple[Stage, ...]
    start: str = ""
    """Name of the shipped model whose weights and tokenizer it starts from; empty for new ones."""
    weight_decay: float = 0.05
    clip: float = 1.0
    others_share: float = 0.08
    """Share of the tokens not said by the assistant that are learnt too."""
    others_weight: float = 0.1
    """Weight of their mean loss in the sum."""
    gap_rows: float = 0.5
    """Share of rows whose positions sometimes jump ahead."""
    tool_rows: float = 0.25
    """Share of rows of 512 tokens or more whose system message lists the tools."""


_FIRST = Mix(
    unknown=0.1,
    truncated=0.0,
    notes=(0.0, 0.25, 0.75),
    system=0.0,
    questions=0.85,
    again=0.1,
    runs=0.0,
    max_facts=3,
    shown=0.5,
    words=32,
)
"""Few words, short sessions, most settings repeated at once: copying and matching come first."""
_PLAIN = Mix(words=WORDS)
_NOTES = replace(_PLAIN, hidden=0.6, counted=0.5, notes=(0.15, 0.7, 0.15))

_MATCHING = replace(_FIRST, unknown=0.0, notes=(0.3, 0.4, 0.3), max_facts=4, words=16)
"""As few words as possible, and fewer repetitions: now a value must be found by its name."""
_MIXED = replace(_MATCHING, unknown=0.2, truncated=0.1, system=0.2, runs=0.1, words=WORDS)
_FEW_NAMES = replace(
    _MATCHING, hidden=0.85, unknown=0.05, notes=(0.0, 1.0, 0.0), max_facts=2, questions=0.8
)
"""Few names, one or two per output, and nearly all hidden after a note without values, so that
notes must distinguish names."""
_MORE_FACTS = replace(_FEW_NAMES, max_facts=4)
"""The same names, more of them in one output: more to distinguish."""
_MORE_NAMES = replace(_MORE_FACTS, words=40)
"""A wider vocabulary again, as at the beginning."""
_ALL_NAMES = replace(_MORE_FACTS, words=WORDS)
"""All names; longer sessions and look-ups return only after this."""
_CHOICES = Mix(truncated=0.0, system=0.0, questions=0.8, choices=0.7, max_facts=3, words=WORDS)
"""Short sessions; in most turns without a question the assistant thinks."""
_THINKING = replace(_PLAIN, choices=0.4)
_BEGINNING = (
    Stage(96, 32, 400, 4e-3, _FIRST),
    Stage(96, 32, 400, 2e-3, _MATCHING, fall=1.0),
    Stage(96, 32, 200, 3e-3, replace(_MATCHING, words=40), fall=1.0),
    Stage(96, 32, 250, 3e-3, replace(_MATCHING, words=WORDS), fall=1.0),
    Stage(96, 32, 500, 3e-3, replace(_MATCHING, words=WORDS), fall=1.0),
    Stage(128, 24, 350, 3e-3, _MIXED, fall=1.0),
    Stage(256, 16, 300, 2e-3, _PLAIN, fall=1.0),
)
"""The vocabulary widens once recall among fewer words is nearly certain; sooner, recall is lost."""
RECIPES = {
    "plain": Recipe(
        seed=1,
        stages=(
            *_BEGINNING,
            Stage(512, 8, 250, 2e-3, _PLAIN, fall=1.0),
            Stage(1024, 4, 250, 2e-3, _PLAIN),
        ),
    ),
    "notes": Recipe(
        seed=1,
        stages=(
            *_BEGINNING,
            Stage(256, 16, 400, 2e-3, _NOTES, fall=1.0),
            Stage(512, 8, 200, 2e-3, _NOTES),
            Stage(128, 24, 500, 3e-3, _FEW_NAMES, fall=1.0),
            Stage(128, 24, 300, 3e-3, _MORE_FACTS, fall=1.0),
            Stage(128, 24, 300, 3e-3, _MORE_NAMES, fall=1.0),
            Stage(128, 24, 400, 3e-3, _ALL_NAMES, fall=1.0),
            Stage(256, 16, 400, 2e-3, _NOTES, fall=1.0),
            Stage(512, 8, 300, 2e-3, _NOTES),
        ),
    ),
    "thinking": Recipe(
        seed=1,
        start="leyline-recall",
        stages=(
            Stage(128, 24, 1200, 3e-3, _CHOICES, fall=1.0),
            Stage(256, 16, 300, 2e-3, _THINKING, fall=1.0),
            Stage(512, 8, 250, 2e-3, _THINKING, fall=1.0),
            Stage(1024, 4, 250, 2e-3, _THINKING),
        ),
    ),
}
"""The first two begin alike; then the notes model's outputs are hidden from later turns. The
thinking model continues from the plain one."""


def batches(recipe: Recipe, number: int, encoder: Encoder, *, pad: int) -> Iterator[Batch]:
    """Yield the batches of one stage, in order."""
    stage = recipe.stages[number]
    rng = Random(f"{recipe.seed}-{number}")
    for _ in range(stage.steps):
        rows = [
            encoder.row(
                session(rng, stage.mix),
                stage.length,
                tools=stage.length >= 512 and rng.random() < recipe.tool_rows,
                gaps=rng if rng.random() < recipe.gap_rows else None,
            )
            for _ in range(stage.rows)
        ]
        yield collate(rows, stage.length, pad=pad)


def loss_and_choices(
    model: Any, batch: Batch, recipe: Recipe, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the loss to descend, the mean loss of the assistant's tokens, and the choices.

    The choices are [B, T] int64: the model's own token for each token that the assistant says; -1
    elsewhere.
    """
    hidden = hidden_states(model, batch.ids, batch.positions, batch.mask)[:, :-1]
    wanted = batch.ids[:, 1:]
    learnt = batch.learnt[:, 1:]
    drawn = torch.rand(learnt.shape, generator=generator) < recipe.others_share
    others = batch.real[:, 1:] & ~learnt & drawn
    chosen = learnt | others
    logits = model.lm_head(hidden[chosen]).float()
    losses = torch.nn.functional.cross_entropy(logits, wanted[chosen], reduction="none")
    said = learnt[chosen]
    answer_loss = losses[said].mean()
    loss = answer_loss + recipe.others_weight * losses[~said].mean()
    choices = torch.full_like(batch.ids, -1)
    choices[:, 1:][learnt] = logits[said].argmax(-1)
    return loss, answer_loss.detach(), choices


def optimizers_of(
    model: Any, rate: float, weight_decay: float
) -> tuple[torch.optim.Optimizer, ...]:
    """Return Muon for the layers' matrices, AdamW for norms and embeddings."""
    named = list(model.named_parameters())
    matrices = [p for name, p in named if p.dim() == 2 and "embed" not in name]
    others = [p for name, p in named if p.dim() != 2 or "embed" in name]
    return (
        torch.optim.Muon(
            matrices,
            lr=rate,
            weight_decay=weight_decay,
            adjust_lr_fn="match_rms_adamw",  # so that one rate fits both
        ),
        torch.optim.AdamW(
            others, lr=_ADAM_SHARE * rate, weight_decay=0.0, betas=(0.9, 0.95), fused=True
        ),
    )


def run_stage(
    model: Any, tokenizer: Any, recipe: Recipe, number: int, report: Callable[[int, Entry], None]
) -> None:
    """Train in place through one stage.

    Call ``report`` after each step, with the curve's next entry every 50 steps, else with an empty
    one.
    """
    stage = recipe.stages[number]
    encoder = Encoder(tokenizer.backend_tokenizer)
    generator = torch.Generator().manual_seed(recipe.seed + number)
    optimizers = optimizers_of(model, stage.learning_rate, recipe.weight_decay)
    window, losses, tokens, began = Tally(), [], 0, time.process_time()
    for step, batch in enumerate(batches(recipe, number, encoder, pad=tokenizer.pad_token_id)):
        for optimizer, share in zip(optimizers, (1.0, _ADAM_SHARE), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = share * stage.rate(step)
        with torch.autocast("cpu", torch.bfloat16):
            loss, answer_loss, choices = loss_and_choices(model, batch, recipe, generator)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        tokens += int(batch.real.sum())
        losses.append(float(answer_loss))
        for answer, right in judged(batch, choices):
            window.count(kind(answer), right)
        entry: Entry = {}
        if (step + 1) % _REPORT_EVERY == 0 or step + 1 == stage.steps:
            entry = {
                "stage": number,
                "step": step + 1,
                "tokens": tokens,
                "cpu_seconds": round(time.process_time() - began, 1),
                "loss": round(sum(losses) / len(losses), 4),
                **window.rates(),
            }
            window, losses = Tally(), []
        report(step + 1, entry)


def train(model: Any, tokenizer: Any, recipe: Recipe, out: Path) -> None:
    """Train through all stages that ``out`` doesn't have yet, and save after each."""
    record_file = out / "training.json"
    curve: list[Entry] = []
    if record_file.is_file():
        curve = json.loads(record_file.read_text(encoding="utf-8"))["curve"]
    done = 1 + max((int(entry["stage"]) for entry in curve), default=-1)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns) as progress:
        for number in range(done, len(recipe.stages)):
            stage = recipe.stages[number]
            bar = progress.add_task(f"rows of {stage.length}", total=stage.steps)

            def report(step: int, entry: Entry, bar: TaskID = bar) -> None:
                progress.update(bar, completed=step)
                if entry:
                    curve.append(entry)
                    progress.console.print(json.dumps(entry), soft_wrap=True)

            run_stage(model, tokenizer, recipe, number, report)
            model.save_pretrained(out)
            record = {"recipe": asdict(recipe), "curve": curve}
            record_file.write_text(json.dumps(record, indent=1), encoding="utf-8")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", choices=sorted(RECIPES))
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        help="folder for the model; goes on behind the stages that it already has",
    )
    options = parser.parse_args()
    recipe = RECIPES[options.recipe]
    if (options.out / "config.json").is_file():
        tokenizer = AutoTokenizer.from_pretrained(options.out)
        model = AutoModelForCausalLM.from_pretrained(options.out, dtype=torch.float32)
    elif recipe.start:
        folder = trained_model_dir(recipe.start)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.chat_template = THINKING_CHAT_TEMPLATE
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        tokenizer.save_pretrained(options.out)
    else:
        tokenizer = train_tokenizer(recipe.seed, max_context=MAX_CONTEXT)
        config = model_config(
            vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, max_context=MAX_CONTEXT
        )
        model = new_model(config, seed=recipe.seed)
        tokenizer.save_pretrained(options.out)
    train(model.train(), tokenizer, recipe, options.out)


if __name__ == "__main__":
    main()
