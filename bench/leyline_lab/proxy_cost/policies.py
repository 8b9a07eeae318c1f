"""The cost of policies per turn: every one that ships, alone and all in one pipeline.

A synthetic agent session grows to each size; then it continues turn by turn, each with one more
call and its result, through the proxy's own `prepare`, with the state that the proxy keeps between
turns. CPU time of the whole stage: policies, their marks, the checks, the fingerprints of what they
edited.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import islice
from statistics import median, quantiles
from time import process_time

import msgspec

from leyline_policies import Policy, Registry, approximate_tokens, load_pipeline
from leyline_proxy.edits.policy_facts import PolicyMemos, known_objects
from leyline_proxy.edits.prepare import PolicySession, prepare
from leyline_proxy.model.messages import Message, fingerprint
from leyline_proxy.model.prepared import Prepared
from leyline_proxy.model.text_memory import Reader

from ..console import write_json
from ..harness.arguments import Arguments, numbers
from ..harness.report import progress, show
from .agent import TASK, rounds

GOAL_MS = 2.0
"""Milliseconds of all together, at 100K tokens."""

SETTINGS = {
    "clear_tool_uses": "trigger_tokens=20000",
    "compact_on_request": "tool=bash,policies=['clear_tool_uses:trigger_tokens=20000']",
    "fallback": "max_tokens=50000,policies=['summarize:trigger_tokens=50000';"
    "'sliding_window:max_messages=200']",
    "quarantine": "",
    "redact": "detectors=[email;aws_key]",
    "relevance": "trigger_tokens=50000",
    "remove_regex": "remove=['<diff>.*?</diff>']",
    "sliding_window": "max_messages=1000",
    "tiered": "target_tokens=50000,tiers=['deduplicate_calls';'sliding_window:max_messages=200']",
}
"""Settings that give each of them something to do."""

WINDOW = 128_000
FILLER = "".join(f"\nsrc/module_{n}.py:{n}: unused import" for n in range(21))


def sessions(tokens: int) -> Iterator[list[Message]]:
    """Yield message lists of turns from about ``tokens`` tokens on, each decoded as in a proxy."""
    messages: list[Message] = [
        {"role": "system", "content": "You are a careful software engineer."},
        {"role": "user", "content": TASK},
    ]
    size = 0
    for call, result in rounds(random.Random(7), 6_000):
        # The recorded coding sessions have 250 tokens per message, calls and results together.
        messages += [call, {**result, "content": result["content"] + FILLER}]
        size += sum(map(approximate_tokens, messages[-2:]))
        if size >= tokens:
            yield msgspec.json.decode(msgspec.json.encode(messages))


def measured(policies: Sequence[Policy], tokens: int, turns: int) -> list[float]:
    """Return CPU milliseconds of the policy stage on each turn, without three to warm up."""
    memos = PolicyMemos()
    last: Prepared | None = None
    spent: list[float] = []
    for index, messages in enumerate(islice(sessions(tokens), turns + 3)):
        prints = tuple(map(fingerprint, messages))
        begun = process_time()
        client = known_objects(messages, prints, last)
        with memos.of(Reader("bench", "bench"), policies) as memo:
            facts = PolicySession(
                window=WINDOW,
                idle_s=600.0 if index == 0 else 5.0,
                states=last.states if last is not None else {},
                memo=memo,
            )
            last = prepare(client, policies, (), index, fingerprints=prints, session=facts)
        _ = last.sent_fingerprints
        spent.append((process_time() - begun) * 1e3)
        if last.faults:
            raise SystemExit(f"a policy failed: {last.faults}")
    return spent[3:]


def spec(name: str) -> str:
    """Return a policy with the settings that give it something to do."""
    return f"{name}:{SETTINGS[name]}" if SETTINGS.get(name) else name


def main() -> None:
    """Measure, print, write."""
    parser = Arguments(__doc__)
    parser.add_argument("--sizes", type=numbers, default="25000,50000,100000", help="in tokens")
    parser.add_argument("--turns", type=int, default=40, help="measured per policy and size")
    given = parser.parse_args()
    registry = Registry.discover()
    pipelines = {name: load_pipeline(spec(name), registry) for name in registry.names()}
    pipelines["all together"] = tuple(each for one in pipelines.values() for each in one)
    results: dict[str, dict[str, dict[str, float]]] = {}
    with progress("policies", len(pipelines) * len(given.sizes)) as step:
        for name, policies in pipelines.items():
            for size in given.sizes:
                spent = measured(policies, size, given.turns)
                figures = {"p50_ms": median(spent), "p90_ms": quantiles(spent, n=10)[-1]}
                results.setdefault(name, {})[str(size)] = figures
                step()
    rows = [
        [name, *(f"{each['p50_ms']:.3f}" for each in by_size.values())]
        for name, by_size in results.items()
    ]
    show(("policy", *(f"p50 ms at {size:,}" for size in given.sizes)), rows)
    write_json(given.json, results)
