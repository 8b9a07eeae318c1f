"""The cost of the proxy itself per chat turn: CPU time by stage and prompt size.

A synthetic agent session (calls, and results of mixed sizes) is brought to each size and its
latest turns are retained, as in a running proxy. Then one more turn with texts that are new goes
through the product's own functions, again and again. No engine, network or event loop takes part.
"""

from __future__ import annotations

import gc
import random
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import linear_regression, median
from time import process_time
from typing import Any

import msgspec

from leyline_engine.contract import ATTENTION_SINK, edit_envelope, token_digest
from leyline_policies import load_pipeline
from leyline_proxy.edits.prepare import prepare
from leyline_proxy.model.history import history_chain
from leyline_proxy.model.messages import Message
from leyline_proxy.model.session import Departed, RetainedTurn
from leyline_proxy.model.undeclared import UndeclaredRules
from leyline_proxy.plan.naming import name_spans
from leyline_proxy.plan.outgoing import edit_payload, outgoing_body
from leyline_proxy.plan.synthesis import synthesize
from leyline_proxy.render import ChatRenderer
from leyline_proxy.request.parse import parse_chat
from leyline_proxy.tenants import Tenant

from ..console import write_json
from ..harness.arguments import Arguments, numbers
from ..harness.report import progress, show
from ..pictures import new_figure, save_figure
from .agent import FRESH_CHARS, TOOLS, renderer_document, session_messages, text_of_size

Results = dict[str, dict[str, dict[str, Any]]]

KINDS = ("append", "edit_end", "edit_start")
STAGES = ("parse", "policy", "diff", "render", "tokenise", "forward")
ASIDE = "policy_truncate"  # not in the total: the turn itself runs ``keep_all``
GOAL = 50.0  # µs per 1,000 prompt tokens that an append may cost
RETAINED, WARM_UP = 4, 3  # turns; the first is the proxy's default
REPLACED_CHARS = 200
RULES = UndeclaredRules.parse(["tool=amortize"])
KEEP, TRUNCATE = load_pipeline("keep_all"), load_pipeline("truncate_older_than")
TENANT = Tenant("bench", (), RULES, allow_request_policy=True)


def retain(
    renderer: ChatRenderer, history: Sequence[Message], earlier: Sequence[RetainedTurn]
) -> RetainedTurn:
    """Return the turn that the last message of ``history`` answered, as the session keeps it."""
    index = len(history)
    prepared = prepare(list(history[:-1]), (), (), index)
    rendered = renderer.render(prepared.messages, TOOLS)
    whole = renderer.encode(renderer.text(history, TOOLS, add_generation_prompt=False))
    outputs = whole[len(rendered.tokens) : -1]
    # Known since the turn's own plan.
    assert prepared.client_fingerprints and prepared.sent_fingerprints
    name = f"t{index}"
    return RetainedTurn(
        turn=name,
        index=index,
        prepared=prepared,
        rendered=rendered,
        output_ids=tuple(outputs),
        lineage=(),
        receipt=None,
        digest=token_digest(rendered.tokens + array("q", outputs)),
        model_fingerprint=TENANT.name,
        names=name_spans(name, prepared, earlier, Departed(), rendered),
    )


def retained_turns(renderer: ChatRenderer, history: Sequence[Message]) -> list[RetainedTurn]:
    """Return the session's latest turns, oldest first."""
    ends = range(len(history) - 2 * (RETAINED - 1), len(history) + 1, 2)
    turns: list[RetainedTurn] = []
    for end in ends:
        if end > 2:
            turns.append(retain(renderer, history[:end], turns))
    return turns


def next_body(history: Sequence[Message], kind: str, variant: str) -> bytes:
    """Return the request that follows; every variant's new texts are different."""
    rng = random.Random(f"{kind}-{variant}")
    messages = list(history)
    call = messages[-1]["tool_calls"][0]["id"]
    if kind != "append":
        results = [i for i, m in enumerate(messages) if m["role"] == "tool"]
        large = [i for i in results if len(messages[i]["content"]) >= REPLACED_CHARS] or results
        place = large[-1] if kind == "edit_end" else large[0]
        messages[place] = {**messages[place], "content": text_of_size(rng, REPLACED_CHARS)}
    fresh = text_of_size(rng, FRESH_CHARS)
    messages.append({"role": "tool", "tool_call_id": call, "content": fresh})
    return msgspec.json.encode({"model": "tiny", "messages": messages, "tools": TOOLS})


@contextmanager
def clocked(seconds: dict[str, float], stage: str) -> Iterator[None]:
    """Note the process's CPU time under ``stage``."""
    started = process_time()
    yield
    seconds[stage] = process_time() - started


def measure_turn(
    renderer: ChatRenderer, turns: Sequence[RetainedTurn], raw: bytes, *, edited: bool
) -> tuple[dict[str, float], int]:
    """Return CPU seconds by stage, and the prompt's tokens."""
    # In a session the newest turn has just been put together: its tokens aren't joined yet.
    retained, index = (*turns[:-1], replace(turns[-1])), len(turns)
    assert all(turn.tokens for turn in turns[:-1])
    gc.collect()
    seconds: dict[str, float] = {}
    with clocked(seconds, "parse"):
        request = parse_chat(raw, {}, TENANT)
        history_chain(request.fingerprints)
    with clocked(seconds, ASIDE):
        prepare(request.messages, TRUNCATE, (), index)
    with clocked(seconds, "policy"):
        prepared = prepare(request.messages, KEEP, (), index, fingerprints=request.fingerprints)
    with clocked(seconds, "render"):
        prompt = renderer.lay_out(prepared.messages, request.body["tools"])
    with clocked(seconds, "tokenise"):
        rendered = renderer.tokenise(prompt)
    with clocked(seconds, "diff"):
        names = name_spans("t-next", prepared, retained, Departed(), rendered)
        plan = synthesize(
            retained, prepared, rendered, RULES, names=names, model_fingerprint=TENANT.name
        )
    assert bool(plan.edits) == edited, "this turn is not of the kind that it claims to be"
    with clocked(seconds, "forward"):
        payload = edit_payload(request, "s-bench", "t-next", plan, ATTENTION_SINK)
        outgoing_body(request, prepared, edit_envelope("m-bench", payload))
    return seconds, len(rendered.tokens)


def measure(
    renderer: ChatRenderer, sizes: Sequence[int], repeat: int, step: Callable[[], None]
) -> Results:
    """Return medians for every size and kind."""
    results: Results = {}
    for size in sizes:
        fresh = len(renderer.encode(text_of_size(random.Random(7), FRESH_CHARS)))
        history = session_messages(renderer, size - fresh)
        turns = retained_turns(renderer, history)
        for kind in KINDS:
            runs: list[dict[str, float]] = []
            for variant in range(WARM_UP + repeat):
                raw = next_body(history, kind, f"{size}-{variant}")
                seconds, tokens = measure_turn(renderer, turns, raw, edited=kind != "append")
                runs += [seconds] if variant >= WARM_UP else []
                step()
            total = 1e3 * median(sum(run[stage] for stage in STAGES) for run in runs)
            stages = {s: round(1e3 * median(run[s] for run in runs), 4) for s in (*STAGES, ASIDE)}
            results.setdefault(str(size), {})[kind] = {
                "tokens": tokens,
                "messages": len(history) + 1,
                "body_bytes": len(raw),
                "stages_ms": stages,
                "total_ms": round(total, 4),
                "us_per_1k_tokens": round(1e6 * total / tokens, 1),
            }
    return results


def slopes(results: Results) -> dict[str, float]:
    """Return an append's cost by stage, µs per 1,000 tokens: least squares over the sizes."""
    entries = [kinds["append"] for kinds in results.values()]
    if len(entries) < 2:  # a line needs two points
        return dict.fromkeys((*STAGES, ASIDE, "total"), float("nan"))
    tokens = [entry["tokens"] / 1000 for entry in entries]
    costs = [{**entry["stages_ms"], "total": entry["total_ms"]} for entry in entries]
    return {s: linear_regression(tokens, [1e3 * c[s] for c in costs]).slope for s in costs[0]}


def rows(results: Results) -> Iterator[list[str] | None]:
    """Yield milliseconds by stage, and their growth."""
    for kinds in results.values():
        for kind, entry in kinds.items():
            times = [f"{entry['stages_ms'][s]:.2f}" for s in (*STAGES, ASIDE)]
            ratio = [f"{entry['total_ms']:.2f}", f"{entry['us_per_1k_tokens']:.0f}"]
            yield [kind, f"{entry['tokens']:,}", *times[:-1], *ratio, times[-1]]
        yield None
    growth = slopes(results)
    cells = [f"{growth[s]:.1f}" for s in (*STAGES, "total", ASIDE)]
    yield ["slope, µs/1K", "", *cells[:-1], f"goal {GOAL:.0f}", cells[-1]]


def draw(results: Results, out: Path) -> None:
    """Draw totals by prompt size, and the goal."""
    figure = new_figure(7, 4.5)
    axes = figure.add_subplot()
    for kind in KINDS:
        points = [(kinds[kind]["tokens"], kinds[kind]["total_ms"]) for kinds in results.values()]
        axes.plot(*zip(*points, strict=True), marker="o", label=kind)
    ends = [0, max(kinds["append"]["tokens"] for kinds in results.values())]
    axes.plot(ends, [x * GOAL / 1e6 for x in ends], "k--", label=f"goal: {GOAL:.0f} µs per 1K")
    axes.set(xlabel="prompt tokens", ylabel="CPU ms per turn", title="Proxy cost per chat turn")
    axes.legend()
    save_figure(figure, out)


def main() -> None:
    """Measure, print, write."""
    parser = Arguments(__doc__, required=True, plot=True)
    parser.add_argument(
        "--sizes", type=numbers, default="1000,10000,50000,100000", help="prompt tokens"
    )
    parser.add_argument("--repeat", type=int, default=15, help="measured turns of each kind")
    given = parser.parse_args()
    renderer, sizes = ChatRenderer(**renderer_document()), sorted(given.sizes)
    with progress("turns", len(sizes) * len(KINDS) * (WARM_UP + given.repeat)) as step:
        results = measure(renderer, sizes, given.repeat, step)
    write_json(given.json, results)
    if given.plot:
        draw(results, given.plot)
    columns = ("turn", "tokens", *STAGES, "total", "µs/1K tokens", f"({ASIDE})")
    title = "CPU time of the proxy per turn, ms (medians)"
    show(columns, rows(results), title=title)
    if len(results) > 1:
        growth = slopes(results)["total"]
        ratio = f"{growth / GOAL:.1f} times the goal of {GOAL:.0f}"
        print(f"An append grows by {growth:.1f} µs per 1K tokens: {ratio}.")
