"""The margin gate's worth: does a small margin mark the turns whose first token reuse gets wrong?

Two sessions have the same block, each after a beginning of its own, and the second one copies it
from the first. Its first token is compared with that of a full prefill of the same prompt, and its
margin is the engine's own. There are two workloads:

* ``task``: turns of the recall task, and a question at the end. The models have learnt this.
* ``text``: pieces of a recorded agent session. The models know nothing of it, and guess.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from random import Random
from typing import Any

from leyline_engine.contract import EditPayload, ReuseMode, ReusePayload
from leyline_lab.fidelity.recall_task import (
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
from leyline_lab.fidelity.recall_words import FILES, KEYS
from leyline_lab.training.encoding import render
from leyline_lab.training.train import WORDS
from leyline_replay.engine import GenerationRequest, ReplayEngine
from leyline_replay.models.loader import LoadedModel, load_model

from ..console import write_json
from ..harness.arguments import Arguments
from ..harness.report import progress, show
from ..traces.texts import demo_material

MODELS = ("leyline-recall", "leyline-recall-notes")
THRESHOLDS = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
FACTS = 4
"""Settings in each output."""
MEASURES = ReusePayload(mode=ReuseMode.LIVE, margin=1e-9)
"""Measures each margin, and gives reuse up only where two tokens are level."""
_POOL = 16_384
_HEAD, _DOCUMENT = 100, 400
"""Tokens of a beginning, and of the block, in the workload ``text``."""


class Asked(StrEnum):
    """The place of the setting that is asked for."""

    BLOCK = "block"
    """The block that is copied: known."""
    HEAD = "head"
    """The second session's own beginning: known, and computed."""
    FOREIGN = "foreign"
    """The first session's beginning: not in the prompt, but the copied KV has read it."""
    NOWHERE = "nowhere"
    """No prompt: to be looked up."""
    NOTHING = "nothing"
    """Nothing is asked for: the workload ``text``."""


_PLACES = (Asked.BLOCK, Asked.HEAD, Asked.FOREIGN, Asked.NOWHERE)


@dataclass(frozen=True, slots=True)
class Case:
    """Two prompts, of which the second is measured."""

    first: array[int]
    second: array[int]
    asked: Asked


@dataclass(frozen=True, slots=True)
class Outcome:
    """One measured prompt."""

    asked: Asked
    margin: float
    wrong: bool
    """True if the first token isn't the full prefill's."""
    tokens: int
    reused: int


def draw_text(rng: Random, text: Sequence[int]) -> Case:
    """Draw two prompts of pieces of a text, with one piece in common."""

    def piece(length: int) -> array[int]:
        start = rng.randrange(len(text) - length)
        return array("q", text[start : start + length])

    block = piece(_DOCUMENT)
    first = piece(_HEAD) + block + piece(_HEAD)
    return Case(first, piece(_HEAD) + block + piece(rng.randint(4, _HEAD)), Asked.NOTHING)


def draw_task(rng: Random, loaded: LoadedModel, turns: int) -> Case:
    """Draw two sessions with ``turns`` other turns each, around what is asked for."""
    keys = rng.sample(KEYS[:WORDS], k=3 * FACTS + 1)
    chunks = {}
    for number, holder in enumerate(_PLACES[:-1]):
        facts = {key: value(rng, WORDS) for key in keys[number * FACTS :][:FACTS]}
        output = "\n".join(f"{key}={text}" for key, text in facts.items())
        chunks[holder] = read(rng.choice(FILES), output, remark(rng.choice(list(Note)), facts))
    other = _other_turns(rng, keys)
    block = [chunks[Asked.BLOCK], *(next(other) for _ in range(turns))]
    heads = [
        [chunks[holder], *(next(other) for _ in range(rng.randint(0, turns)))]
        for holder in (Asked.FOREIGN, Asked.HEAD)
    ]
    place = rng.randrange(len(_PLACES))
    asked = _PLACES[place]
    key = keys[-1] if asked is Asked.NOWHERE else rng.choice(keys[place * FACTS :][:FACTS])
    question = render(ask(key)) + "<|im_start|>assistant\n"

    def tokens(parts: Sequence[Turn], end: str) -> array[int]:
        text = "".join(render(message) for turn in parts for message in turn) + end
        return array("q", loaded.tokenizer.encode(text, add_special_tokens=False))

    first = tokens([*heads[0], *block], render(Message("user", "Thanks.")))
    return Case(first, tokens([*heads[1], *block], question), asked)


def _other_turns(rng: Random, taken: Sequence[str]) -> Iterator[Turn]:
    """Yield turns of the task that don't name the settings ``taken``."""
    while True:
        for turn in session(rng, Mix(system=0.0, words=WORDS)):
            said = " ".join(render(message) for message in turn)
            if not any(key in said for key in taken):
                yield turn


def run_case(engine: ReplayEngine, case: Case) -> Outcome | None:
    """Run one case from empty caches; returns None if nothing was copied."""
    full, _ = _prefill(engine, case.second, "full", None)
    engine.flush()
    _prefill(engine, case.first, "first", MEASURES)
    token, receipt = _prefill(engine, case.second, "second", MEASURES)
    engine.flush()
    counts = receipt.reuse
    if counts is None or counts.margin is None or not counts.total:
        return None
    prompt = receipt.tokens.prompt
    return Outcome(case.asked, counts.margin, token != full, prompt, receipt.tokens.reused)


def _prefill(
    engine: ReplayEngine, tokens: array[int], name: str, reuse: ReusePayload | None
) -> tuple[int, Any]:
    """Return a prompt's first token and its receipt."""
    payload = EditPayload(session=name, scope="bench", turn=name)
    sequence = engine.admit(GenerationRequest(name, tokens, payload, reuse, max_new_tokens=1))
    logits = None
    while logits is None:
        logits = sequence.prefill_step()
    token = int(logits.argmax())
    return token, sequence.finish(token).receipt


def separation(outcomes: Sequence[Outcome]) -> float | None:
    """Return how often a wrong turn's margin is below a right one's: 1 always, 0.5 by chance."""
    wrong = [each.margin for each in outcomes if each.wrong]
    right = [each.margin for each in outcomes if not each.wrong]
    if not wrong or not right:
        return None
    below = sum((w < r) + (w == r) / 2 for w in wrong for r in right)
    return below / (len(wrong) * len(right))


def by_threshold(outcomes: Sequence[Outcome]) -> list[dict[str, float]]:
    """Return, by threshold, the shares of turns that are gated, and that are wrong after it."""
    count = len(outcomes) or 1
    return [
        {
            "threshold": threshold,
            "gated": sum(each.margin < threshold for each in outcomes) / count,
            "wrong_after": sum(e.wrong and e.margin >= threshold for e in outcomes) / count,
            "wrong_if_random": sum(each.wrong for each in outcomes)
            / count
            * (1 - sum(each.margin < threshold for each in outcomes) / count),
        }
        for threshold in THRESHOLDS
    ]


def measure(loaded: LoadedModel, cases: Iterator[Case], step: Callable[[], None]) -> dict[str, Any]:
    """Run all cases."""
    engine = ReplayEngine(loaded, pool_tokens=_POOL)
    outcomes = []
    for case in cases:
        outcome = run_case(engine, case)
        outcomes += [] if outcome is None else [outcome]
        step()
    total = len(outcomes) or 1
    return {
        "prompts": len(outcomes),
        "prompt_tokens": round(sum(each.tokens for each in outcomes) / total),
        "reused": round(sum(each.reused for each in outcomes) / total),
        "wrong": sum(each.wrong for each in outcomes) / total,
        "wrong_by_place": {
            str(asked): sum(each.wrong for each in outcomes if each.asked is asked)
            / sum(each.asked is asked for each in outcomes)
            for asked in sorted({each.asked for each in outcomes})
        },
        "separation": separation(outcomes),
        "thresholds": by_threshold(outcomes),
    }


def print_results(results: dict[str, Any]) -> None:
    """Print the shares by model and threshold, then the wrong ones by place."""
    rows: list[Sequence[object] | None] = []
    for model, entry in results.items():
        for row in entry["thresholds"]:
            shares = (row["gated"], entry["wrong"], row["wrong_after"], row["wrong_if_random"])
            rows.append((model, f"{row['threshold']:g}", *(f"{each:.1%}" for each in shares)))
        rows.append(None)
    columns = ("prompts", "threshold", "gated", "wrong before", "wrong after", "if random")
    title = "First tokens that differ from a full prefill's, before and after the gate"
    show(columns, rows, title=title)
    for model, entry in results.items():
        places = ", ".join(f"{k} {v:.1%}" for k, v in entry["wrong_by_place"].items())
        chance = entry["separation"]
        said = "" if chance is None else f"; separation {chance:.2f}"
        print(f"{model}: {entry['prompts']} prompts, wrong by place: {places}{said}")


def main() -> None:
    """Measure each model and workload, print, write."""
    parser = Arguments(__doc__)
    parser.add_argument("--models", nargs="+", default=MODELS, help="names or folders")
    parser.add_argument("--count", type=int, default=400, help="prompts of each workload")
    parser.add_argument("--turns", type=int, default=6, help="other turns in a block of the task")
    given = parser.parse_args()
    results: dict[str, Any] = {}
    text = demo_material().text
    with progress("prompts", 2 * len(given.models) * given.count) as step:
        for name in given.models:
            loaded = load_model(name, device="cpu", dtype="float32")
            ids = loaded.tokenizer.encode(text, add_special_tokens=False)
            draws: dict[str, Callable[[Random], Case]] = {
                "task": partial(draw_task, loaded=loaded, turns=given.turns),
                "text": partial(draw_text, text=ids),
            }
            for workload, draw in draws.items():
                rng = Random(f"margin-{workload}")
                cases = (draw(rng) for _ in range(given.count))
                results[f"{loaded.name}, {workload}"] = measure(loaded, cases, step)
    print_results(results)
    write_json(given.json, results)
