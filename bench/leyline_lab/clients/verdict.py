"""The faults of a client's session, if any."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ..stand_ins.scripted_model import ModelTurn
from .stack import Ran, Stack

NOTES = "notes.txt"
TEXT = "leyline keeps the cache\n"
SIZE = "size.txt"
MEASURE = f"wc -c < {NOTES} > {SIZE}"
SHOW = f"cat {NOTES} {SIZE}"
LAST = "Both files are there."
"""The model's last answer."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A session in figures; it passed where there are no problems."""

    turns: int
    prompt_tokens: tuple[int, ...]
    cached_tokens: tuple[int, ...]
    sessions: int
    """Sessions of the proxy, those of auxiliary requests included."""
    problems: tuple[str, ...]

    @property
    def prefilled(self) -> tuple[int, ...]:
        """Prompt tokens per turn that weren't cached."""
        pairs = zip(self.prompt_tokens, self.cached_tokens, strict=True)
        return tuple(prompt - cached for prompt, cached in pairs)


def judge(
    stack: Stack,
    ran: Ran,
    *,
    steps: int,
    appends: bool = True,
    websocket: bool = False,
    asks: frozenset[str] = frozenset(),
) -> Verdict:
    """Check that the session ended well, was recognised and used the cache.

    Args:
        steps: answers that the session takes.
        appends: whether the client leaves its history as it is.
        websocket: True if the client must have used WebSocket alone.
        asks: hosts that it may ask.
    """
    ran_all = stack.model.turns()
    turns = [turn for turn in ran_all if turn.followed]
    sessions = stack.sessions() if stack.proxied else []
    problems = [
        *_ending(stack, ran),
        *([f"{len(turns)} turns instead of {steps}"] if len(turns) != steps else []),
        *(session_problems(sessions, ran_all) if stack.proxied else ()),
        *cache_problems(ran_all),
        *(edit_problems(sessions, turns) if appends else ()),
        *(f"{s.method} {s.path} answered {s.status}" for s in stack.refused()),
        *(_transport_problems(stack) if websocket else ()),
        *(
            f"wanted to reach {target}"
            for target in stack.place.trip.wanted
            if _host(target) not in asks
        ),
    ]
    return Verdict(
        turns=len(turns),
        prompt_tokens=tuple(len(turn.prompt) for turn in turns),
        cached_tokens=tuple(turn.cached for turn in turns),
        sessions=len(sessions),
        problems=tuple(problems),
    )


def _host(target: str) -> str:
    """Return the host of a forward proxy's request line."""
    address = target.partition(" ")[2]
    return urlsplit(address if "://" in address else f"//{address}").hostname or ""


def _ending(stack: Stack, ran: Ran) -> list[str]:
    problems = []
    if ran.code != 0:
        problems.append("didn't end" if ran.code is None else f"exit status {ran.code}")
    if LAST not in ran.output:
        problems.append("the last answer isn't shown")
    for name, wanted in ((NOTES, TEXT.strip()), (SIZE, str(len(TEXT)))):
        if _content(stack.place.work / name) != wanted:
            problems.append(f"{name} isn't as it should be")
    return problems


def _transport_problems(stack: Stack) -> list[str]:
    """The reasons why the client's turns didn't all come over WebSocket."""
    methods = {seen.method for seen in stack.tap.seen if seen.path == "/v1/responses"}
    return [] if methods == {"WEBSOCKET"} else [f"turns came by {', '.join(sorted(methods))}"]


def _content(path: Path) -> str | None:
    return path.read_text(encoding="utf-8").strip() if path.is_file() else None


def session_problems(sessions: list[dict[str, Any]], turns: list[ModelTurn]) -> list[str]:
    """The reasons why the followed turns are not one session with all its turns."""
    names = {turn.receipt.session for turn in turns if turn.followed}
    if len(names) != 1:
        return [f"one conversation became {len(names)} sessions"]
    # Where a client names its session, auxiliary requests bear the same name.
    wanted = sum(turn.receipt.session in names for turn in turns)
    counted = sum(session["turns"] for session in sessions if session["id"] in names)
    return [] if counted == wanted else [f"the session has {counted} turns instead of {wanted}"]


def cache_problems(turns: list[ModelTurn]) -> list[str]:
    """Every token that an earlier request shares must be a hit, as in an engine without a proxy."""
    problems = []
    for index, turn in enumerate(turns):
        shared = max((turn.shares(earlier) for earlier in turns[:index]), default=0)
        # The last prompt token is always computed: its logits are the answer's first.
        wanted = min(shared, len(turn.prompt) - 1)
        if turn.cached < wanted:
            problems.append(f"request {index}: {turn.cached} tokens cached of {wanted} known")
    return problems


def edit_problems(sessions: list[dict[str, Any]], turns: list[ModelTurn]) -> list[str]:
    """A history that is only appended to, answers included, must not count as edited."""
    edits = {
        turn["receipt"]["message_id"]: len(turn["edits"])
        for session in sessions
        for turn in session["history"]
        if turn["receipt"] is not None
    }
    return [
        f"turn {index} was taken for an edited history"
        for index, turn in enumerate(turns)
        if index and edits.get(turn.receipt.message_id)
    ]
