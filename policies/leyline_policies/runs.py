"""Runs of removed messages as parts: plain texts, and addresses that stay while a run grows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from leyline_policies.conversation import RESULT_ROLES, ToolCall, tags_of, text_of
from leyline_policies.policy import Message
from leyline_policies.recall import evicted_by, sources_of
from leyline_policies.stubs import Evicted, address_of

PART_TOKENS = 4_000
"""Tokens from which on a part of a run is complete."""
MAX_PARTS = 16
"""Number of parts of one run; of a longer run, each part holds twice as much, and so on."""


class Removed(NamedTuple):
    """A removed message, as the text of a run shows it."""

    message: Message
    tokens: int
    tool: str = ""
    """Name of the tool whose result it is."""
    asked: str = ""
    """The call that it answers, if that was removed from a message that stays."""


class RunParts:
    """The parts of one run of removed messages.

    Runs grow at their end from turn to turn. A part that is complete keeps its messages, so its
    address stays; only the last one changes.
    """

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._parts: tuple[Evicted, ...] = ()
        self._made: dict[tuple[int, int], Evicted] = {}
        self.tokens = 0
        """Number of tokens of the last run."""
        self.nested: tuple[Evicted, ...] = ()
        """Parts whose stubs the messages of the last run show."""

    def of(
        self, messages: list[Message], policy: str, describe: Callable[[], Iterable[Removed]]
    ) -> tuple[Evicted, ...]:
        """Return the parts of a run, made again only where it differs from the last one.

        Args:
            describe: returns the same messages with all that their text shows.
        """
        known = self._messages
        if messages == known:
            return self._parts
        if messages[: len(known)] != known:
            self._made = {}
        run = [*describe()]
        self._made = {
            piece: self._made.get(piece) or _part(run[slice(*piece)], policy)
            for piece in _pieces(run)
        }
        self._messages, self._parts = (
            messages,
            tuple(part for part in self._made.values() if part.text),
        )
        self.tokens = sum(each.tokens for each in run)
        self.nested = tuple(part for message in messages for part in evicted_by(message))
        return self._parts


def called_at(message: Message, call: ToolCall) -> str:
    """Return a call as the text of a run shows it."""
    found: Any = message.get("function_call")
    if call.position is not None:
        found = message["tool_calls"][call.position]
    return _call(found)


def _pieces(run: Sequence[Removed]) -> Iterator[tuple[int, int]]:
    """Yield start and end of each part."""
    least = PART_TOKENS
    while len(starts := _starts(run, least)) > MAX_PARTS:
        least *= 2
    return zip(starts, [*starts[1:], len(run)], strict=True)


def _starts(run: Sequence[Removed], least: int) -> list[int]:
    """Return where parts of ``least`` tokens or more begin; never between a call and its results.

    A last part that isn't complete may be of any size.
    """
    starts, size = [0], 0
    for index, each in enumerate(run):
        if size >= least and each.message.get("role") not in RESULT_ROLES:
            starts.append(index)
            size = 0
        size += each.tokens
    return starts


def _part(run: Sequence[Removed], policy: str) -> Evicted:
    first, alone = run[0], len(run) == 1
    text = "\n\n".join(_told(each) for each in run)
    if alone and not _calls(first.message) and not first.asked:
        text = text_of(first.message)
    return Evicted(
        address=address_of(text),
        text=text,
        role=str(first.message.get("role")) if alone else "",
        tool=first.tool if alone else "",
        tokens=sum(each.tokens for each in run),
        policy=policy,
        tags=tuple(dict.fromkeys(tag for each in run for tag in tags_of(each.message))),
        messages=len(run),
        sources=tuple(dict.fromkeys(at for each in run for at in sources_of(each.message))),
    )


def _told(removed: Removed) -> str:
    """Return one message as text: a line with its role, its text, its calls."""
    message = removed.message
    role = str(message.get("role"))
    head = f"[{removed.tool or 'tool'} output]" if role in RESULT_ROLES else f"[{role}]"
    content = message.get("content")
    others = [_other(part) for part in content] if isinstance(content, list) else []
    lines = [removed.asked, head, text_of(message), *others, *_calls(message)]
    return "\n".join(filter(None, lines))


def _calls(message: Message) -> list[str]:
    called = [*(message.get("tool_calls") or ()), message.get("function_call")]
    return [*filter(None, map(_call, called))]


def _call(called: Any) -> str:
    if not isinstance(called, Mapping):
        return ""
    body = called.get("function") or called.get("custom") or called
    if not isinstance(body, Mapping):
        return ""
    return f"[calls {body.get('name')}]\n{body.get('arguments') or body.get('input') or ''}"


def _other(part: object) -> str:
    """Return a line for a part that is no text, which isn't kept."""
    if isinstance(part, str) or (isinstance(part, Mapping) and isinstance(part.get("text"), str)):
        return ""
    kind = part.get("type") if isinstance(part, Mapping) else None
    return f"[{kind if isinstance(kind, str) and kind.isidentifier() else 'part'}, left out]"
