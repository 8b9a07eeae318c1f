"""Functions that an instrumented template calls while it runs.

There is one :class:`Runtime` per run of the template, and one :class:`Run` per run of a loop in it.
The module's filters are those that :mod:`.loops` writes into templates.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from operator import is_
from secrets import token_bytes
from typing import Any, NamedTuple

from jinja2 import Environment, Undefined, pass_environment
from jinja2.utils import Namespace

from ...model.text_memory import NO_SESSION, Reader
from ..marks import Found, read_marks, unused_characters, with_marks
from .fragments import Fragment, FragmentMemory, MessageEntry, key_of
from .loops import ENTER, ITEMS, LEAVE, RECALL, Instrumented
from .reads import LOOP_MEMBER, MEMBER

_LONGEST_LEFT = 4096
"""Longest namespace value that is remembered as a side effect of an iteration."""
_LONGEST_PLAIN = 64
"""Longest text that is a token itself; longer ones are compared by digest."""
_PURE_GLOBALS = ("raise_exception", "namespace", "range", "dict")

_ITEM = b"item "
"""Prefix of the keys of items that aren't messages, which have no other form."""
_MISSING = object()
_NO_MEMBER, _UNDEFINED = ("no member",), ("undefined",)

Token = tuple[Any, ...]
"""A stand-in for a value in a key: equal tokens mean equal values."""


class DivergedError(Exception):
    """The template with marked contents reaches a loop in another state."""


class Placed(NamedTuple):
    """A fragment in a prompt, and the index of its message (none: -1)."""

    fragment: Fragment
    message: int


class Break:
    """The start of a loop's fragments, among the texts around the loops."""


Part = str | Placed | Break
_BREAK = Break()


class Values:
    """Digests of values. Keyed, so no caller can construct a collision."""

    def __init__(self, environment: Environment) -> None:
        self._pure = {id(environment.globals[name]): name.encode() for name in _PURE_GLOBALS}
        self._secret = token_bytes(32)

    def digest(self, value: Any) -> bytes | None:
        """Return the digest of plain data or of a pure function; None for other values."""
        key = key_of(value)
        if key is None:
            return self._pure.get(id(value))
        return blake2b(key, digest_size=16, key=self._secret).digest()


class Runtime:
    """One run of a template.

    Args:
        form: the template as instrumented.
        values: of the template.
        memory: of the template.
        entries: of the template's messages, with their indices, by the messages' identities.
        shadowed: the run whose loops this one skips, to see the text around them.
        reader: the session whose prompt it is.
    """

    def __init__(
        self,
        form: Instrumented,
        values: Values,
        memory: FragmentMemory,
        entries: Mapping[int, tuple[MessageEntry, int]],
        *,
        shadowed: Runtime | None = None,
        reader: Reader = NO_SESSION,
    ) -> None:
        self.reader = reader
        self.form = form
        self.memory = memory
        self.shadowed = shadowed
        self.entries = entries
        self.parts: list[Part] = []
        self.placed: Placed | None = None
        """The fragment whose text the template yields next."""
        self.located = True
        """True if marks show the places of contents in the fragments so far."""
        self.runs: list[Run] = []
        self._values = values
        self._digests: dict[int, tuple[Any, bytes | None]] = {}

    def collect(self, chunks: Iterable[str]) -> list[Part]:
        """Return the prompt in parts, from the template's output."""
        parts = self.parts
        for chunk in chunks:
            parts.append(chunk if self.placed is None else self.placed)
            self.placed = None
        return parts

    def token(self, value: Any) -> Token | None:
        """Return the token of a value in a key; None if there can't be one."""
        kind = value.__class__
        if kind is bool or kind is int or value is None:
            return (kind, value)
        if kind is str and len(value) <= _LONGEST_PLAIN:
            return (kind, value)
        if value is _MISSING:
            return _NO_MEMBER
        if isinstance(value, Undefined):
            return _UNDEFINED
        known = self._digests.get(id(value))
        if known is None:  # with the value, so its id stays unique
            known = self._digests[id(value)] = (value, self._values.digest(value))
        return None if known[1] is None else (kind, known[1])

    def entry_of(self, item: Any) -> tuple[MessageEntry | None, int]:
        """Return the entry of a loop's item, and its message index (none: -1)."""
        known = self.entries.get(id(item))
        if known is not None:
            return known
        data = key_of(item)
        if data is None:
            return None, -1
        key = _ITEM + data
        (found,) = self.memory.find([key], self.reader)
        return found or self.memory.add(MessageEntry(key, {}), self.reader), -1


@dataclass(slots=True)
class Run:
    """One run of one loop."""

    runtime: Runtime
    number: int
    key: bytes | None
    """Key of the loop and the outer variables; None if one of those has no token."""
    state: tuple[Token | None, ...]
    """Tokens of the relevant namespace attributes, at the beginning."""
    written: list[tuple[Namespace, str]]
    left: tuple[Any, ...] = ()
    """Values that the loop left in those."""
    pending: tuple[Any, MessageEntry | None, int, Hashable] = field(default=(None, None, -1, None))
    """The item that must be rendered again, and the place to remember it."""
    _last: tuple[tuple[Any, ...], tuple[Any, ...]] | None = None
    """The values read in the iteration before, and their key."""

    def recall(self, item: Any, values: tuple[Any, ...]) -> str | None:
        """Return the iteration's text, if known."""
        runtime = self.runtime
        entry, message = runtime.entry_of(item)
        key = self._key_of(values)
        if entry is None or None in key:
            self.pending = (item, None, message, None)
            return None
        fragment = entry.fragments.get(key)
        if fragment is None:
            self.pending = (item, entry, message, key)
            return None
        if self.written:
            self.restore(fragment.after)
        return self._place(fragment, message)

    def _key_of(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the key of an iteration's text, without its item."""
        last, token = self._last, self.runtime.token
        if last is not None and all(map(is_, values, last[0])):
            key = last[1]  # the same values as before, as in most iterations
        else:
            key = (self.key, *[token(value) for value in values])
            self._last = values, key
        if self.written:
            return (*key, *[token(value) for value in self.now()])
        return key

    def __call__(self, *, caller: Callable[[Any], str]) -> str:
        """Run the body again, and remember its text."""
        item, entry, message, key = self.pending
        before = self.now()
        text = str(caller(item))
        after = self.now()
        form = self.runtime.form
        if message < 0:
            # An item made from messages that isn't one has contents that can't be located.
            located = not form.of_messages[self.number]
            fragment = Fragment(text, None, False, located, after)
        elif form.loops[self.number].contents:
            fragment = Fragment(text, None, False, False, after)
        else:
            self.restore(before)
            found = self._with_marks(item, text, after, caller)
            self.restore(after)
            span = next(((s.start, s.end) for s in found.spans), None) if found else None
            marked = found is not None and bool(found.marked)
            fragment = Fragment(text, span, marked, found is not None, after)
        if entry is not None and all(map(_is_small, after)):
            self.runtime.memory.remember(entry, key, fragment)
        return self._place(fragment, message)

    def now(self) -> tuple[Any, ...]:
        """Return the current values of the written attributes."""
        return tuple([getattr(space, name, _MISSING) for space, name in self.written])

    def restore(self, values: Iterable[Any]) -> None:
        """Set the written attributes."""
        for (space, name), value in zip(self.written, values, strict=True):
            if value is not _MISSING:
                space[name] = value

    def _place(self, fragment: Fragment, message: int) -> str:
        self.runtime.placed = Placed(fragment, message)
        if not fragment.located:
            self.runtime.located = False
        return fragment.text

    def _with_marks(
        self,
        item: Mapping[str, Any],
        text: str,
        after: tuple[Any, ...],
        caller: Callable[[Any], str],
    ) -> Found | None:
        """Return the place of the item's content in its text; None if marks change more."""
        marks = unused_characters(text)
        if marks is None:
            return None
        try:
            marked = str(caller(with_marks(item, 0, marks)))
        except Exception:  # a template may refuse contents by their form
            return None
        token = self.runtime.token
        if [*map(token, self.now())] != [*map(token, after)]:
            return None  # the content reaches later iterations
        return read_marks(marked, marks, text)


def _is_small(value: Any) -> bool:
    """Return True if a value may be kept: short and immutable."""
    kind = value.__class__
    scalar = kind in (bool, int, float) or value is None or value is _MISSING
    return scalar or (kind is str and len(value) <= _LONGEST_LEFT)


def _enter(runtime: Runtime, number: int, *values: Any) -> Run:
    reads, token = runtime.form.loops[number], runtime.token
    names, spaces = values[: len(reads.names)], values[len(reads.names) :]
    named = dict(zip(reads.namespaces, spaces, strict=True))
    tokens = tuple(map(token, names))
    known = None not in tokens and all(isinstance(space, Namespace) for space in spaces)
    run = Run(
        runtime,
        number,
        _key(number, tokens) if known else None,
        tuple(token(getattr(named[name], attr, _MISSING)) for name, attr in reads.touched),
        [(named[name], attr) for name, attr in reads.written] if known else [],
    )
    if runtime.shadowed is not None:
        _shadow(run, runtime.shadowed.runs[len(runtime.runs)])
    runtime.runs.append(run)
    return run


def _key(number: int, tokens: tuple[Token | None, ...]) -> bytes:
    text = repr((number, tokens)).encode("utf-8", "surrogatepass")
    return blake2b(text, digest_size=16).digest()


def _shadow(run: Run, before: Run) -> None:
    """Adopt the values that a loop left; it doesn't run again."""
    same = (run.number, run.key, run.state) == (before.number, before.key, before.state)
    if not same or run.key is None or None in run.state:
        raise DivergedError
    run.left = before.left


def _items(iterable: Iterable[Any], run: Run) -> Iterable[Any]:
    run.runtime.parts.append(_BREAK)
    return () if run.runtime.shadowed is not None else iterable


def _recall(run: Run, item: Any, *values: Any) -> str | None:
    return run.recall(item, values)


def _leave(run: Run) -> None:
    if run.runtime.shadowed is None:
        run.left = run.now()
    else:
        run.restore(run.left)


@pass_environment
def _member(environment: Environment, value: Any, *names: str) -> Any:
    for name in names:
        if isinstance(value, Undefined):
            return _MISSING
        value = environment.getattr(value, name)
    return value


FILTERS: Mapping[str, Callable[..., Any]] = {
    ENTER: _enter,
    ITEMS: _items,
    RECALL: _recall,
    LEAVE: _leave,
    MEMBER: _member,
    LOOP_MEMBER: getattr,
}
"""Filters by their names in instrumented templates."""
