"""The text form of a policy pipeline: ``name:key=value,key=value | name``.

A value is one of

- bare text up to the next ``,`` or ``|``, without the spaces around it;
- quoted, ``"a,b"`` or ``'a|b'``: everything between the quotes literally, backslashes too (so
  regular expressions need no escaping); the quote itself is written twice;
- a list, ``[a;b;"c;d"]``; a comma separates as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from leyline_policies.errors import SpecError, shown

_NAME = re.compile(r"[A-Za-z_][\w.-]*")
_BARE = re.compile(r"[\w.*/+-]+")
MAX_STEPS = 16
"""Maximum number of policies in one pipeline; each may spend its own time on a turn."""

_QUOTES = "\"'"


@dataclass(frozen=True, slots=True)
class Value:
    """A setting's value as written: its text, if it was quoted, and its items if a list."""

    text: str
    quoted: bool = False
    items: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """One policy of a pipeline as written."""

    name: str
    settings: tuple[tuple[str, Value], ...] = ()


def parse_steps(spec: str) -> tuple[Step, ...]:
    """Split ``spec`` into its steps; blank text is a pipeline of none.

    Raises SpecError, naming the place, for text that does not follow the grammar.
    """
    if not spec.strip():
        return ()
    scanner = _Scanner(spec)
    steps = [_step(scanner)]
    while scanner.take("|"):
        if len(steps) == MAX_STEPS:
            raise SpecError(f"a pipeline has at most {MAX_STEPS} policies")
        steps.append(_step(scanner))
    return tuple(steps)


def write_steps(steps: Iterable[Step]) -> str:
    """Return the text of a pipeline; `parse_steps` returns the steps again."""
    return " | ".join(map(_written, steps))


def value_of(typed: object) -> Value:
    """Return a typed setting as it is written; as its `str` if neither text, number nor list."""
    if typed is None or isinstance(typed, bool):
        return Value(str(typed).lower())
    if isinstance(typed, str):
        return Value(typed, quoted=True)
    if isinstance(typed, list | tuple | set | frozenset):
        items = sorted(typed, key=str) if isinstance(typed, set | frozenset) else typed
        return Value("", items=tuple(map(str, items)))
    return Value(str(typed))


def _written(step: Step) -> str:
    settings = ",".join(f"{key}={_written_value(value)}" for key, value in step.settings)
    return f"{step.name}:{settings}" if settings else step.name


def _written_value(value: Value) -> str:
    if value.items is not None and not value.quoted:
        # Kept as written: a parameter that takes text may read a list's text.
        return value.text or f"[{';'.join(map(_written_text, value.items))}]"
    # Quoted text needs quotes again only if it would read as something else.
    needed = value.quoted and value.text.lower() == "none"
    return _quoted(value.text) if needed else _written_text(value.text)


def _written_text(text: str) -> str:
    return text if _BARE.fullmatch(text) else _quoted(text)


def _quoted(text: str) -> str:
    quote = "'" if "'" not in text else '"'
    return f"{quote}{text.replace(quote, quote * 2)}{quote}"


class _Scanner:
    """A position in a text."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def peek(self) -> str:
        return self.text[self.at : self.at + 1]

    def take(self, char: str) -> bool:
        found = self.peek() == char
        self.at += found
        return found

    def skip_spaces(self) -> None:
        while self.peek().isspace():
            self.at += 1

    def until(self, stops: str) -> str:
        start = self.at
        while self.peek() and self.peek() not in stops:
            self.at += 1
        return self.text[start : self.at]

    def quoted(self) -> str:
        quote, start = self.peek(), self.at
        parts: list[str] = []
        while self.take(quote):  # a doubled quote closes and opens again: it means one
            begin = self.at
            self.at = self.text.find(quote, begin)
            if self.at < 0:
                raise self.error(f"the quote {quote} is never closed", start)
            parts.append(self.text[begin : self.at])
            self.at += 1
        return quote.join(parts)

    def error(self, message: str, at: int | None = None) -> SpecError:
        place = self.at if at is None else at
        return SpecError(f"{message} (at character {place} of the policy spec)")


def _step(scanner: _Scanner) -> Step:
    scanner.skip_spaces()
    start = scanner.at
    name = scanner.until(":|").strip()
    if not name:
        raise scanner.error("a policy name is missing", start)
    if not _NAME.fullmatch(name):
        raise scanner.error(
            f"{shown(name)} is no policy name; write name:key=value,key=value, and quote a value "
            "that holds ',' or '|'",
            start,
        )
    settings: dict[str, Value] = {}
    if scanner.take(":"):
        scanner.skip_spaces()
        more = scanner.peek() not in ("", "|")
        while more:
            key, value = _setting(scanner, name)
            if key in settings:
                raise scanner.error(f"{name}: {key} is set twice")
            settings[key] = value
            more = scanner.take(",")
    return Step(name, tuple(settings.items()))


def _setting(scanner: _Scanner, policy: str) -> tuple[str, Value]:
    scanner.skip_spaces()
    start = scanner.at
    key = scanner.until("=,|").strip()
    if not scanner.take("="):
        problem = f"{shown(key)} has no value" if key else "a key is missing"
        raise scanner.error(
            f"{policy}: {problem}; write key=value, and quote a value that holds ',' or '|'", start
        )
    if not key:
        raise scanner.error(f"{policy}: a key is missing before '='", start)
    scanner.skip_spaces()
    value = _value(scanner)
    scanner.skip_spaces()
    if scanner.peek() not in ("", ",", "|"):
        rest = scanner.until(",|")
        raise scanner.error(
            f"{policy}: {shown(rest)} follows the value of {key}; write a quote inside quotes twice"
        )
    return key, value


def _value(scanner: _Scanner) -> Value:
    start = scanner.at
    if scanner.peek() and scanner.peek() in _QUOTES:
        return Value(scanner.quoted(), quoted=True)
    if scanner.peek() != "[":
        return Value(scanner.until(",|").strip())
    items = _items(scanner)
    # A regular expression may begin with a character class: "[a-z]+" is text and no list.
    rest = scanner.until(",|").strip()
    text = scanner.text[start : scanner.at].strip()
    return Value(text) if rest else Value(text, items=items)


def _items(scanner: _Scanner) -> tuple[str, ...]:
    start = scanner.at
    scanner.take("[")
    items: list[str] = []
    while True:
        scanner.skip_spaces()
        quoted = bool(scanner.peek()) and scanner.peek() in _QUOTES
        item = scanner.quoted() if quoted else scanner.until(";,]").strip()
        if item or quoted:
            items.append(item)
        scanner.skip_spaces()
        if scanner.take("]"):
            return tuple(items)
        if not (scanner.take(";") or scanner.take(",")):
            raise scanner.error(
                "the list that '[' opens is never closed; quote a value that holds brackets", start
            )
