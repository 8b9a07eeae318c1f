"""Triggers: conditions on the conversation, combined with ``&``, ``|`` and ``~``.

As text (`parse_trigger`): ``tokens > 100000 and (idle > 5m or fraction > 0.8)``.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from leyline_policies.context import Context
from leyline_policies.conversation import tags_of, text_of, tool_uses_in
from leyline_policies.errors import SpecError, did_you_mean, shown
from leyline_policies.policy import Message

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([smhd]?)")
_COMPARE: dict[str, Callable[[float, float], bool]] = {">": operator.gt, ">=": operator.ge}


class Trigger:
    """A condition on the messages and the session's facts."""

    __slots__ = ()

    def fires(self, messages: Sequence[Message], context: Context) -> bool:
        """Return True if the condition holds."""
        raise NotImplementedError

    def __and__(self, other: Trigger) -> Trigger:
        return _All((*_parts(self, _All), *_parts(other, _All)))

    def __or__(self, other: Trigger) -> Trigger:
        return _Any((*_parts(self, _Any), *_parts(other, _Any)))

    def __invert__(self) -> Trigger:
        return _Not(self)


@dataclass(frozen=True, slots=True)
class _All(Trigger):
    parts: tuple[Trigger, ...]

    def fires(self, messages: Sequence[Message], context: Context) -> bool:
        return all(part.fires(messages, context) for part in self.parts)


@dataclass(frozen=True, slots=True)
class _Any(Trigger):
    parts: tuple[Trigger, ...]

    def fires(self, messages: Sequence[Message], context: Context) -> bool:
        return any(part.fires(messages, context) for part in self.parts)


@dataclass(frozen=True, slots=True)
class _Not(Trigger):
    part: Trigger

    def fires(self, messages: Sequence[Message], context: Context) -> bool:
        return not self.part.fires(messages, context)


def _parts(trigger: Trigger, joint: type[_All] | type[_Any]) -> tuple[Trigger, ...]:
    """Return the parts of a chain, flat: a caller's text must not nest without end."""
    return trigger.parts if isinstance(trigger, joint) else (trigger,)


Measure = Callable[[Sequence[Message], Context], float]


@dataclass(frozen=True, slots=True)
class _Over(Trigger):
    """A measure against a bound."""

    measure: Measure = field(repr=False)
    name: str
    bound: float
    sign: str = ">"

    def fires(self, messages: Sequence[Message], context: Context) -> bool:
        return _COMPARE[self.sign](self.measure(messages, context), self.bound)


@dataclass(frozen=True, slots=True)
class _Tagged(Trigger):
    name: str

    def fires(self, messages: Sequence[Message], context: Context) -> bool:
        return any(self.name in tags_of(message) for message in messages)


@dataclass(frozen=True, slots=True)
class _Keyword(Trigger):
    """A word in the newest message of the user, in any case."""

    word: str

    def fires(self, messages: Sequence[Message], context: Context) -> bool:
        for message in reversed(messages):
            if message.get("role") == "user":
                return self.word.casefold() in text_of(message).casefold()
        return False


def _fraction(messages: Sequence[Message], context: Context) -> float:
    return context.total(messages) / context.window if context.window else 0.0


_MEASURES: dict[str, Measure] = {
    "tokens": lambda messages, context: context.total(messages),
    "messages": lambda messages, context: len(messages),
    "fraction": _fraction,
    "tool_uses": lambda messages, context: tool_uses_in(messages),
    "idle": lambda messages, context: context.idle_s,
    "turns": lambda messages, context: context.turn,
}
_WORDS: dict[str, Callable[[str], Trigger]] = {"tag": _Tagged, "keyword": _Keyword}


def tokens(over: int) -> Trigger:
    """Fire at more than ``over`` tokens in the messages."""
    return _over("tokens", over)


def messages(over: int) -> Trigger:
    """Fire at more than ``over`` messages."""
    return _over("messages", over)


def fraction(over: float) -> Trigger:
    """Fire at more than this share of the model's window; never if the window is unknown.

    Raises:
        ValueError: not between 0 and 1.
    """
    return _over("fraction", over)


def tool_uses(over: int) -> Trigger:
    """Fire at more than ``over`` tool calls."""
    return _over("tool_uses", over)


def idle(over: float | str) -> Trigger:
    """Fire if the session slept longer than this: seconds, or a text such as ``5m``."""
    return _over("idle", duration_s(over) if isinstance(over, str) else over)


def turns(over: int) -> Trigger:
    """Fire after more than ``over`` turns."""
    return _over("turns", over)


def tag(name: str) -> Trigger:
    """Fire if a message carries this tag."""
    return _Tagged(name)


def keyword(word: str) -> Trigger:
    """Fire if the user's newest message holds this word."""
    return _Keyword(word)


def _over(name: str, bound: float, sign: str = ">") -> Trigger:
    if name == "fraction" and not 0 <= bound <= 1:
        raise ValueError(f"fraction {sign} {bound:g} never changes: it lies between 0 and 1")
    return _Over(_MEASURES[name], name, bound, sign)


def duration_s(text: str) -> float:
    """Return the seconds of ``30``, ``30s``, ``5m``, ``1.5h`` or ``2d``.

    Raises:
        ValueError: anything else.
    """
    found = _DURATION.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{shown(text)} is no duration such as 30s, 5m or 2h")
    return float(found[1]) * _UNITS[found[2] or "s"]


_TOKEN = re.compile(
    r"""\s*(?:(?P<paren>[()])
    |(?P<joint>and\b|or\b|not\b)
    |(?P<word>tag|keyword)\s*:\s*(?:"(?P<quoted>[^"]*)"|(?P<bare>[\w.-]+))
    |(?P<name>[a-z_]+)\s*(?P<sign>>=|>)\s*(?P<bound>\d[\d_]*(?:\.\d+)?\s*[smhd]?)\b)""",
    re.VERBOSE,
)


def parse_trigger(text: str) -> Trigger:
    """Return a trigger from its text form; ``and`` binds before ``or``.

    Raises:
        SpecError: names the place and the words known there.
    """
    return _Reader(text).whole()


class _Reader:
    """Recursive descent over a trigger's text."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0

    def whole(self) -> Trigger:
        found = self._either()
        if self._text[self._at :].strip():
            raise self._error("'and' or 'or' is missing")
        return found

    def _either(self) -> Trigger:
        parts = [self._both()]
        while self._take("or"):
            parts.append(self._both())
        return parts[0] if len(parts) == 1 else _Any(tuple(parts))

    def _both(self) -> Trigger:
        parts = [self._one()]
        while self._take("and"):
            parts.append(self._one())
        return parts[0] if len(parts) == 1 else _All(tuple(parts))

    def _one(self) -> Trigger:
        self._depth += 1
        if self._depth > 64:
            raise self._error("the trigger is nested too deep")
        try:
            if self._take("not"):
                return ~self._one()
            if self._take("("):
                found = self._either()
                if not self._take(")"):
                    raise self._error("')' is missing")
                return found
            return self._leaf()
        finally:
            self._depth -= 1

    def _leaf(self) -> Trigger:
        found = _TOKEN.match(self._text, self._at)
        if found is None or not (found["word"] or found["name"]):
            raise self._error("a condition such as tokens > 100000 or tag:NAME is missing")
        if found["word"]:
            self._at = found.end()
            value = found["quoted"] if found["quoted"] is not None else found["bare"]
            return _WORDS[found["word"]](value)
        name, bound = found["name"], found["bound"].replace("_", "").strip()
        if name not in _MEASURES:
            known = (*_MEASURES, *_WORDS)
            raise self._error(
                f"nothing is measured as {shown(name)}{did_you_mean(name, known) or ';'} "
                f"(known: {', '.join(known)})"
            )
        if name != "idle" and not bound[-1].isdigit():
            raise self._error(f"{name} has no unit")
        self._at = found.end()
        try:
            return _over(name, duration_s(bound) if name == "idle" else float(bound), found["sign"])
        except ValueError as error:
            raise self._error(str(error)) from error

    def _take(self, word: str) -> bool:
        found = _TOKEN.match(self._text, self._at)
        if found is None or word not in (found["paren"], found["joint"]):
            return False
        self._at = found.end()
        return True

    def _error(self, message: str) -> SpecError:
        return SpecError(f"{message} (at character {self._at} of the trigger {shown(self._text)})")
