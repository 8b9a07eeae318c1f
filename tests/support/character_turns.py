"""Conversations whose messages name themselves, as the session keeps them and plans over them.

One token per character; the role marks are in no content.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from leyline_engine.contract import CopySegment, LineageRun, token_digest
from leyline_proxy.edits.prepare import prepare
from leyline_proxy.model.messages import Message, text_of
from leyline_proxy.model.prepared import Prepared
from leyline_proxy.model.rendered import MessageSpan, Rendered
from leyline_proxy.model.session import Departed, RetainedTurn
from leyline_proxy.model.undeclared import UndeclaredRules
from leyline_proxy.plan.naming import name_spans
from leyline_proxy.plan.synthesis import TurnPlan, synthesize

ROLES = ("user", "assistant", "system", "tool")
ANYTHING = UndeclaredRules.parse(dict.fromkeys((*ROLES, "template"), "amortize"))
NOTHING = UndeclaredRules()


def render(
    messages: Sequence[Message], *, context: str = "", unlocated: Collection[str] = ()
) -> Rendered:
    """One token per character, and marks around each message that no content holds.

    Args:
        unlocated: roles whose contents can't be found in the prompt.
    """
    text, spans = "", []
    for index, message in enumerate(messages):
        text += f"<{message['role']}>"
        content = text_of(message)
        if content and message["role"] not in unlocated:
            spans.append(MessageSpan(index, len(text), len(text) + len(content)))
        calls = json.dumps(message["tool_calls"]) if message.get("tool_calls") else ""
        text += f"{content}{calls}</>"
    return Rendered(array("q", map(ord, text + "<assistant>")), tuple(spans), context)


def retained(
    prepared: Prepared,
    name: str = "t0",
    output: str = "",
    lineage: tuple[LineageRun, ...] = (),
    before: Sequence[RetainedTurn] = (),
) -> RetainedTurn:
    """A turn as the session keeps it, ``before`` being those that it kept then."""
    rendered, outputs = render(prepared.messages), tuple(map(ord, output))
    digest = token_digest([*rendered.tokens, *outputs])
    names = name_spans(name, prepared, before, Departed(), rendered)
    return RetainedTurn(
        name, 0, prepared, rendered, outputs, lineage, None, digest, "m", names=names
    )


def turn_of(messages: list[Message], **facts: Any) -> RetainedTurn:
    """A retained turn of messages without edits; see :func:`retained` for the facts."""
    return retained(prepare(messages, (), (), 0), **facts)


def plan_of(
    sources: list[RetainedTurn],
    prepared: Prepared,
    rules: UndeclaredRules = NOTHING,
    *,
    sink: int = 0,
    overhead: int = 0,
) -> TurnPlan:
    """The plan against some retained turns."""
    prompt = render(prepared.messages)
    names = name_spans("now", prepared, sources, Departed(), prompt)
    terms = {"sink": sink, "overhead": overhead}
    return synthesize(sources, prepared, prompt, rules, names=names, model_fingerprint="m", **terms)


@dataclass(frozen=True)
class Rule:
    """A policy that puts one text for another in messages of some roles, or drops a message."""

    old: str
    new: str
    mode: str = "amortize"
    drops: bool = False
    name: str = "rule"

    def transform(self, messages: list[Message], turn_idx: int) -> list[Message]:
        """Rewrite."""
        if self.drops:
            return [m for m in messages if self.old not in (m["content"] or "")]
        return [
            {**m, "content": (m["content"] or "").replace(self.old, self.new)} for m in messages
        ]


@st.composite
def numbered(draw: st.DrawFn) -> list[Message]:
    """Messages whose text says which they are, so that no two can be taken for each other."""
    return [
        {
            "role": draw(st.sampled_from(["user", "assistant", "system"])),
            "content": f"m{index:02d} begins; "
            + f"word{index} " * draw(st.integers(2, 9))
            + "; end",
        }
        for index in range(draw(st.integers(2, 7)))
    ]


@st.composite
def callers_edits(draw: st.DrawFn, count: int) -> dict[int, str]:
    """Apply a caller's edits to some messages: drop, change, or insert one before it."""
    touched = draw(st.sets(st.integers(0, count - 1), max_size=3))
    return {index: draw(st.sampled_from(["drop", "change", "insert"])) for index in touched}


def apply_callers(messages: list[Message], edits: dict[int, str]) -> list[Message]:
    """The caller's next list."""
    result: list[Message] = []
    for index, message in enumerate(messages):
        kind = edits.get(index)
        if kind == "insert":
            result.append({"role": "user", "content": f"new before {index} ; a note of the caller"})
        if kind == "change":
            result.append({**message, "content": message["content"].replace("begins", "BEGAN")})
        elif kind != "drop":
            result.append(message)
    return [*result, {"role": "user", "content": "and the next question of the caller"}]


def first_change(old: Rendered, new: Rendered) -> int:
    """The first place where two prompts differ, found by looking at every token."""
    pairs = zip(old.tokens, new.tokens, strict=False)
    return next(
        (at for at, (a, b) in enumerate(pairs) if a != b), min(len(old.tokens), len(new.tokens))
    )


def copies(plan: TurnPlan) -> list[CopySegment]:
    """The plan's copies."""
    return [segment for segment in plan.segments if isinstance(segment, CopySegment)]
