"""The cost of the proxy itself per chat turn: CPU time by stage and prompt size.

A synthetic agent session (calls, and results of mixed sizes) is brought to each size and its
latest turns are retained, as in a running proxy. Then one more turn with texts that are new goes
through the product's own functions, again and again. No engine, network or event loop takes part.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sysconfig
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from statistics import linear_regression, median
from time import process_time
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from tokenizers import pre_tokenizers

from leyline_engine.contract import ATTENTION_SINK, edit_envelope, token_digest
from leyline_policies import load_pipeline
from leyline_proxy.edits.prepare import prepare
from leyline_proxy.model.history import history_chain
from leyline_proxy.model.session import Departed, RetainedTurn
from leyline_proxy.model.undeclared import UndeclaredRules
from leyline_proxy.plan.naming import name_spans
from leyline_proxy.plan.outgoing import edit_payload, outgoing_body
from leyline_proxy.plan.synthesis import synthesize
from leyline_proxy.render import ChatRenderer
from leyline_proxy.request.parse import parse_chat
from leyline_proxy.tenants import Tenant
from leyline_replay.models.tiny import train_bpe
from leyline_replay.text.chat import PromptEncoder

Message = dict[str, Any]
Results = dict[str, dict[str, dict[str, Any]]]

KINDS = ("append", "edit_end", "edit_start")
STAGES = ("parse", "policy", "diff", "render", "tokenise", "forward")
ASIDE = "policy_truncate"  # not in the total: the turn itself runs ``keep_all``
GOAL = 50.0  # µs per 1,000 prompt tokens that an append may cost
RETAINED, WARM_UP = 4, 3  # turns; the first is the proxy's default
FRESH_CHARS, REPLACED_CHARS = 600, 200  # the same at every size, so that sizes can be compared
RULES = UndeclaredRules.parse(["tool=amortize"])
KEEP, TRUNCATE = load_pipeline("keep_all"), load_pipeline("truncate_older_than")
TENANT = Tenant("bench", (), RULES, allow_request_policy=True)
SYSTEM = "You are a careful software engineer. Read before you write, and run the tests. " * 2
_ARGUMENTS = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": _ARGUMENTS}}
    for name in ("read_file", "shell")
]


def text_of_size(rng: random.Random, chars: int) -> str:
    """Return source lines, log lines and listings, of ``chars`` characters."""
    lines: list[str] = []
    for _ in range(chars // 20 + 1):
        number, word = rng.randrange(10**5), rng.choice(("cache", "token", "radix", "größe"))
        forms = (
            f'        return self._{word}["{number}"].get(value)  # see {word}.py',
            f"-rw-r--r-- 1 dev dev {number:>7} Mar 12 09:41 {word}_{number}.py",
            f"tests/test_{word}.py::test_case_{number} PASSED [{number % 100:>3}%]",
            f"src/{word}.py:{number}: error: expected {word}, found 0x{number:06x}",
        )
        lines.append(rng.choice(forms))
    return "\n".join(lines)[:chars]


def rounds(rng: random.Random, longest: int) -> Iterator[tuple[Message, Message]]:
    """Yield an assistant's call and its result of up to ``longest`` characters, without end."""
    for number in count():
        path = json.dumps({"path": f"src/module_{rng.randrange(999)}.py"})
        function = {"name": rng.choice(("read_file", "shell")), "arguments": path}
        call = {"id": f"call_{number}", "type": "function", "function": function}
        said = f"Step {number}: " + text_of_size(rng, rng.choice((40, 150, 300)))
        chars = rng.choices((100, 400, 1500, 6000), (3, 4, 3, 1))[0]
        result = text_of_size(rng, min(chars, longest))
        yield (
            {"role": "assistant", "content": said, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": result},
        )


def session_messages(renderer: ChatRenderer, tokens: int) -> list[Message]:
    """Return a session whose next prompt has about ``tokens`` tokens; ends with a call."""
    rng = random.Random(7)
    task = {"role": "user", "content": "Find out why the cache loses tokens, and mend it."}
    messages: list[Message] = [{"role": "system", "content": SYSTEM}, task]
    length = len(renderer.encode(text_of_size(rng, FRESH_CHARS)))
    length += len(renderer.render(messages, TOOLS).tokens)
    for said, result in rounds(rng, tokens // 5):
        length += len(renderer.encode(renderer.text([said, result], None)))
        messages.append(said)
        if length >= tokens and len(messages) > 4:
            break
        messages.append(result)
    return messages


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
        history = session_messages(renderer, size)
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


def table(results: Results) -> Table:
    """Return milliseconds by stage, and their growth."""
    shown = Table(title="CPU time of the proxy per turn, ms (medians)")
    for column in ("tokens", "turn", *STAGES, "total", "µs/1K tokens", f"({ASIDE})"):
        shown.add_column(column, justify="left" if column == "turn" else "right")
    for kinds in results.values():
        for kind, entry in kinds.items():
            times = [f"{entry['stages_ms'][s]:.2f}" for s in (*STAGES, ASIDE)]
            ratio = [f"{entry['total_ms']:.2f}", f"{entry['us_per_1k_tokens']:.0f}"]
            shown.add_row(f"{entry['tokens']:,}", kind, *times[:-1], *ratio, times[-1])
        shown.add_section()
    growth = slopes(results)
    cells = [f"{growth[s]:.1f}" for s in (*STAGES, "total", ASIDE)]
    shown.add_row("", "slope, µs/1K", *cells[:-1], f"goal {GOAL:.0f}", cells[-1])
    return shown


def draw(results: Results, out: Path) -> None:
    """Draw totals by prompt size, and the goal."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for kind in KINDS:
        points = [(kinds[kind]["tokens"], kinds[kind]["total_ms"]) for kinds in results.values()]
        axes.plot(*zip(*points, strict=True), marker="o", label=kind)
    ends = [0, max(kinds["append"]["tokens"] for kinds in results.values())]
    axes.plot(ends, [x * GOAL / 1e6 for x in ends], "k--", label=f"goal: {GOAL:.0f} µs per 1K")
    axes.set(xlabel="prompt tokens", ylabel="CPU ms per turn", title="Proxy cost per chat turn")
    axes.legend()
    figure.savefig(out, dpi=150)


def source_texts() -> Iterator[str]:
    """Yield source files of the standard library, in a fixed order, 3 MB in all."""
    remaining = 3_000_000
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")[:remaining]
        remaining -= len(text)
        yield text
        if remaining <= 0:
            return


def renderer_document() -> dict[str, Any]:
    """Return the shipped models' template and a tokenizer of source code, as an engine does.

    Not the shipped tokenizer, which is made for one task and cuts source code into more tokens.
    """
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = train_bpe(pieces, source_texts(), vocab_size=8192, max_context=131_072)
    return PromptEncoder(tokenizer).renderer_document()


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--json", type=Path, required=True, metavar="OUT")
    parser.add_argument("--plot", type=Path, metavar="OUT.png")
    parser.add_argument("--sizes", default="1000,10000,50000,100000", help="prompt tokens")
    parser.add_argument("--repeat", type=int, default=15, help="measured turns of each kind")
    given = parser.parse_args()
    sizes = sorted(int(size) for size in given.sizes.split(","))
    console = Console()
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("turns", total=len(sizes) * len(KINDS) * (WARM_UP + given.repeat))
        results = measure(
            ChatRenderer(**renderer_document()), sizes, given.repeat, lambda: progress.advance(task)
        )
    given.json.parent.mkdir(parents=True, exist_ok=True)
    given.json.write_text(json.dumps(results, indent=2) + "\n")
    if given.plot:
        draw(results, given.plot)
    console.width = max(console.width, 140)  # a narrower table can't be read
    console.print(table(results))
    growth = slopes(results)["total"]
    if len(results) > 1:
        ratio = f"{growth / GOAL:.1f} times the goal of {GOAL:.0f}"
        console.print(f"An append grows by {growth:.1f} µs per 1K tokens: {ratio}.")


if __name__ == "__main__":
    main()
