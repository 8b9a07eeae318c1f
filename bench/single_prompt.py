"""The answers of a splice, compared: one prompt, three ways to take an output out of it.

A session of the recall task reads a configuration and is later asked for one of its settings.
The output that shows the setting is then replaced by a stub, and the question is answered

* over the whole history (``full``),
* over the edited history, prefilled again (``reprefill``),
* over the edited history, spliced from the whole one's KV (``splice``).

Prompts at which the first two give the same answer prove nothing and are counted, not compared.
"""

from __future__ import annotations

import argparse
import json
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import mean
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from leyline_engine.contract import (
    Directive,
    EditPayload,
    LineageRun,
    Mode,
    Outcome,
    Receipt,
    SourceRef,
    token_digest,
)
from leyline_engine.replay.engine import GenerationRequest, ReplayEngine
from leyline_engine.replay.models.loader import LoadedModel, load_model
from training.encoding import render
from training.task import (
    STUB,
    SYSTEM_PROMPT,
    Message,
    Mix,
    Note,
    Turn,
    ask,
    read,
    remark,
    session,
    value,
)
from training.train import WORDS
from training.words import FILES, KEYS

MODELS = ("leyline-recall", "leyline-recall-notes")
ARMS = ("full", "reprefill", "splice")
ANSWER_TOKENS = 24  # the longest right answer, a look-up, has 18
FACTS = 4  # settings in the output that is taken out
Results = dict[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Case:
    """One prompt as tokens, and the edit."""

    before: array[int]
    """Tokens up to the output's content."""
    output: array[int]
    """The output that the edit removes; the only place of the answer, unless a note restates it."""
    after: array[int]
    """Tokens from the output's end to the end of the last turn before the question."""
    question: array[int]
    """The question, and the beginning of the answer's message."""
    stub: array[int]
    answer: str
    line: int
    """Line of the output that has the answer, from 0."""

    @property
    def history(self) -> array[int]:
        """All tokens before the question."""
        return self.before + self.output + self.after

    @property
    def edited(self) -> array[int]:
        """The same with the stub."""
        return self.before + self.stub + self.after


@dataclass(frozen=True, slots=True)
class Said:
    """An answer."""

    first: torch.Tensor
    """fp32 logits [vocab] of its first token."""
    tokens: tuple[int, ...]
    """Tokens decoded greedily, up to the end of the message."""
    receipt: Receipt


def draw_case(rng: Random, loaded: LoadedModel, note: Note, turns: int) -> Case:
    """Draw a session with ``turns`` other turns, half of them before the output, half after."""
    keys = rng.sample(KEYS[:WORDS], k=FACTS)
    facts = {key: value(rng, WORDS) for key in keys}
    other = _other_turns(rng, keys)
    early = [next(other) for _ in range(turns - turns // 2)]
    output = "\n".join(f"{key}={text}" for key, text in facts.items())
    chunk = read(rng.choice(FILES), output, remark(note, facts))
    late = [next(other) for _ in range(turns // 2)]
    asked = rng.choice(keys)

    def tokens(text: str) -> array[int]:
        return array("q", loaded.tokenizer.encode(text, add_special_tokens=False))

    def text(turns: Sequence[Turn]) -> str:
        return "".join(render(message) for turn in turns for message in turn)

    opening = text([(Message("system", SYSTEM_PROMPT),), *early, chunk[:2]])
    return Case(
        before=tokens(opening + "<|im_start|>tool\n"),
        output=tokens(output),
        after=tokens("<|im_end|>\n" + text([chunk[3:], *late])),
        question=tokens(render(ask(asked)) + "<|im_start|>assistant\n"),
        stub=tokens(STUB),
        answer=facts[asked],
        line=keys.index(asked),
    )


def _other_turns(rng: Random, taken: Sequence[str]) -> Iterator[Turn]:
    """Yield turns of the task that don't name the settings ``taken``."""
    while True:
        for turn in session(rng, Mix(system=0.0, words=WORDS)):
            said = " ".join(render(message) for message in turn)
            if not any(key in said for key in taken):
                yield turn
            if rng.random() < 0.1:  # another session begins: no setting runs out
                break


def answer(
    engine: ReplayEngine, loaded: LoadedModel, prompt: array[int], payload: EditPayload | None
) -> Said:
    """Run one request with greedy decoding."""
    name = payload.turn if payload else "plain"
    sequence = engine.admit(
        GenerationRequest(name, prompt, payload, max_new_tokens=ANSWER_TOKENS + 1)
    )
    logits = None
    while logits is None:
        logits = sequence.prefill_step()
    first = logits
    tokens: list[int] = []
    while (token := int(logits.argmax())) != loaded.tokenizer.eos_token_id:
        tokens.append(token)
        if len(tokens) == ANSWER_TOKENS:
            break
        logits = sequence.decode_step(token)
    return Said(first, tuple(tokens), sequence.finish(None).receipt)


def retain(engine: ReplayEngine, tokens: array[int]) -> Receipt:
    """Prefill tokens as a turn that a later one may use."""
    payload = EditPayload(session="s", scope="bench", turn="source")
    sequence = engine.admit(GenerationRequest("source", tokens, payload))
    while sequence.prefill_step() is None:
        pass
    return sequence.finish(None).receipt


def splice(engine: ReplayEngine, loaded: LoadedModel, case: Case, *, asked: bool) -> Said:
    """Edit the history by a directive and answer; ``asked``: the question was part of it."""
    source = case.history + case.question if asked else case.history
    lineage: tuple[LineageRun, ...] = retain(engine, source).lineage
    start = len(case.before)
    edit = Directive(start, start + len(case.output), tuple(case.stub), Mode.AMORTIZE)
    payload = EditPayload(
        session="s",
        scope="bench",
        turn="edited",
        sources=(SourceRef("source", len(source), token_digest(source)),),
        directives=(edit,),
        lineage=tuple(run for run in lineage if run.start < start),
    )
    said = answer(engine, loaded, case.edited + case.question, payload)
    kept = len(case.after) + (len(case.question) - 1 if asked else 0)
    assert said.receipt.outcome is Outcome.SPLICED, said.receipt.detail
    assert said.receipt.tokens.spliced == kept, "something behind the edit was computed anew"
    return said


def run_case(engine: ReplayEngine, loaded: LoadedModel, case: Case) -> dict[str, Said]:
    """Run all arms on one prompt, none of them with anything of another's in the cache."""
    said: dict[str, Said] = {}
    runs: dict[str, Callable[[], Said]] = {
        "full": lambda: answer(engine, loaded, case.history + case.question, None),
        "reprefill": lambda: answer(engine, loaded, case.edited + case.question, None),
        "splice": lambda: splice(engine, loaded, case, asked=False),
        "splice_asked": lambda: splice(engine, loaded, case, asked=True),
    }
    for arm, run in runs.items():
        said[arm] = run()
        engine.flush()
    return said


def divergence(reference: torch.Tensor, other: torch.Tensor) -> float:
    """Return the Kullback-Leibler divergence of the first token's distributions, nats."""
    one, two = (logits.double().log_softmax(-1) for logits in (reference, other))
    return float((one.exp() * (one - two)).sum())


def follows(cases: Sequence[dict[str, Said]], arm: str) -> dict[str, float]:
    """Return the shares of ``cases`` in which ``arm`` answers like full or like re-prefill.

    These two differ in the first token in all ``cases``.
    """
    first: Counter[str] = Counter()
    whole: Counter[str] = Counter()
    for said in cases:
        for counter, of in ((first, _first_token), (whole, lambda s: s.tokens)):
            same = [name for name in ("full", "reprefill") if of(said[arm]) == of(said[name])]
            counter[same[0] if same else "neither"] += 1
    count = len(cases) or 1
    shares = {f"first_{name}": first[name] / count for name in ("full", "reprefill", "neither")}
    shares |= {f"whole_{name}": whole[name] / count for name in ("full", "reprefill", "neither")}
    if cases:
        for name in ("full", "reprefill"):
            shares[f"kl_{name}"] = mean(divergence(s[name].first, s[arm].first) for s in cases)
    return {name: round(share, 4) for name, share in shares.items()}


def _first_token(said: Said) -> int:
    return int(said.first.argmax())


def measure(
    loaded: LoadedModel, note: Note, *, count: int, turns: int, step: Callable[[], None]
) -> dict[str, Any]:
    """Run ``count`` prompts of one kind through all arms."""
    engine = ReplayEngine(loaded, pool_tokens=16_384)
    rng = Random(f"{note}-{turns}")
    right: Counter[str] = Counter()
    lookups: Counter[str] = Counter()
    differing: list[dict[str, Said]] = []
    lines: list[list[bool]] = [[] for _ in range(FACTS)]
    lengths: list[int] = []
    for _ in range(count):
        case = draw_case(rng, loaded, note, turns)
        said = run_case(engine, loaded, case)
        lengths.append(len(case.history) + len(case.question))
        for arm, result in said.items():
            text = loaded.tokenizer.decode(list(result.tokens))
            right[arm] += text == case.answer
            lookups[arm] += text.startswith("<tool_call>")
            if arm == "splice":
                lines[case.line].append(text == case.answer)
        if _first_token(said["full"]) != _first_token(said["reprefill"]):
            differing.append(said)
        step()
    return {
        "prompts": count,
        "prompt_tokens": round(mean(lengths)),
        "references_differ": len(differing),
        "right": {arm: round(right[arm] / count, 4) for arm in right},
        "looked_up": {arm: round(lookups[arm] / count, 4) for arm in right},
        "splice_right_by_line": [round(mean(line), 4) if line else None for line in lines],
        "splice": follows(differing, "splice"),
        "splice_asked": follows(differing, "splice_asked"),
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--json", type=Path, required=True, metavar="OUT")
    parser.add_argument("--plot", type=Path, metavar="OUT.png")
    parser.add_argument("--models", nargs="+", default=MODELS, help="names or folders")
    parser.add_argument("--count", type=int, default=200, help="prompts of each kind")
    parser.add_argument("--turns", type=int, default=8, help="other turns in a prompt")
    given = parser.parse_args()
    console = Console()
    results: Results = {}
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("prompts", total=len(given.models) * len(Note) * given.count)
        for name in given.models:
            loaded = load_model(name, device="cpu")
            results[loaded.name] = {
                str(note): measure(
                    loaded,
                    note,
                    count=given.count,
                    turns=given.turns,
                    step=lambda: progress.advance(task),
                )
                for note in Note
            }
    given.json.parent.mkdir(parents=True, exist_ok=True)
    given.json.write_text(json.dumps(results, indent=2) + "\n")
    if given.plot:
        draw(results, given.plot)
    console.print(table(results))


def table(results: Results) -> Table:
    """Return the shares of right answers, and of those that the splice follows."""
    shown = Table(title="Where full and re-prefill differ, whom does the splice follow?")
    columns = ("model", "note", "differ", "right: full", "re-prefill", "splice", "follows full")
    for column in (*columns, "re-prefill", "neither", "asked first: full", "re-prefill", "neither"):
        shown.add_column(column, justify="left" if column in columns[:2] else "right")
    for model, notes in results.items():
        for note, entry in notes.items():
            followed = [
                f"{entry[arm][f'first_{name}']:.1%}"
                for arm in ("splice", "splice_asked")
                for name in ("full", "reprefill", "neither")
            ]
            right = [f"{entry['right'][arm]:.1%}" for arm in ARMS]
            differ = f"{entry['references_differ']}/{entry['prompts']}"
            shown.add_row(model, note, differ, *right, *followed)
        shown.add_section()
    return shown


def draw(results: Results, out: Path) -> None:
    """Draw the answers that the splice follows, by model and kind of note."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.add_subplot()
    bars = [
        (f"{model.removeprefix('leyline-')}\n{note}", entry["splice"])
        for model, notes in results.items()
        for note, entry in notes.items()
        if entry["references_differ"]
    ]
    bottom = [0.0] * len(bars)
    for name in ("full", "reprefill", "neither"):
        heights = [shares[f"first_{name}"] for _, shares in bars]
        axes.bar([label for label, _ in bars], heights, bottom=bottom, label=name)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axes.set(ylabel="share of prompts", title="Whose first token the splice says")
    axes.legend()
    figure.savefig(out, dpi=150)


if __name__ == "__main__":
    main()
