"""Rendering of a conversation at the cost of its new part.

The template runs as usual, but an iteration of a loop that ran before with equal reads returns its
text (:mod:`.loops`, :mod:`.reads`). The places of contents come from the iterations, each run once
more with marks when new, and from a run with marks of the text around the loops. If anything fails
here, the caller renders the plain way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment

from ...model.text_memory import NO_SESSION, Reader
from ..marks import CharSpan, Found, read_marks, unused_characters, with_marks
from .fragments import FragmentMemory, MessageEntry
from .loops import RUNTIME, instrument
from .runtime import FILTERS, Break, Part, Placed, Runtime, Values


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered conversation."""

    texts: Sequence[str]
    """Parts of the text; those of unchanged messages are the same objects as before."""
    spans: Sequence[CharSpan]
    """Places of contents, in characters of the whole text; sorted and disjoint."""

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(self.texts)


class IncrementalTemplate:
    """A chat template that remembers its loops' iterations.

    Args:
        environment: as for the plain template; filters are added to it.
        source: Jinja source.
        memory: for fragments of this template only.
    """

    def __init__(self, environment: Environment, source: str, memory: FragmentMemory) -> None:
        environment.filters.update(FILTERS)
        self._form = instrument(environment, source)
        self._template = environment.from_string(self._form.tree)
        self._values = Values(environment)
        self._memory = memory

    @property
    def remembers(self) -> bool:
        """True if any loop of the template can be remembered."""
        return bool(self._form.loops)

    def render(
        self,
        entries: Sequence[MessageEntry],
        variables: Mapping[str, Any],
        places: Mapping[int, tuple[MessageEntry, int]] | None = None,
        reader: Reader = NO_SESSION,
    ) -> tuple[list[str], list[CharSpan] | None]:
        """Return the prompt's texts and spans; None for spans that marks don't show.

        Args:
            entries: the messages, each with its own object.
            variables: the template's other variables.
            places: each entry and its index, by the identity of its message, if known.
            reader: the session whose prompt it is.

        Raises:
            Exception: any error of the template, and others. Render the plain way then.
        """
        if places is None:
            places = {id(entry.normal): (entry, at) for at, entry in enumerate(entries)}
        runtime = Runtime(self._form, self._values, self._memory, places, reader=reader)
        parts = self._run(runtime, [entry.normal for entry in entries], variables)
        outside = self._outside(runtime, entries, variables) if runtime.located else None
        return list(_texts(parts)), _spans(parts, outside) if outside is not None else None

    def _run(
        self, runtime: Runtime, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
    ) -> list[Part]:
        seen = {**variables, "messages": messages, RUNTIME: runtime}
        return runtime.collect(self._template.root_render_func(self._template.new_context(seen)))

    def _outside(
        self, runtime: Runtime, entries: Sequence[MessageEntry], variables: Mapping[str, Any]
    ) -> Found | None:
        """Return the contents in the texts around the loops, in characters of the joined texts."""
        if not self._form.contents_outside:
            return Found([], frozenset())
        plain = _around(runtime.parts)
        marks = unused_characters("".join(plain))
        if marks is None:
            return None
        again = Runtime(
            self._form, self._values, self._memory, {}, shadowed=runtime, reader=runtime.reader
        )
        messages = [_marked(entry, index, marks) for index, entry in enumerate(entries)]
        try:
            marked = _around(self._run(again, messages, variables))
        except Exception:  # with marks a template may do anything; the plain way reports it
            return None
        same = len(marked) == len(plain) and all(
            read_marks(text, marks, bare) is not None
            for text, bare in zip(marked, plain, strict=True)
        )
        return read_marks("".join(marked), marks, "".join(plain)) if same else None


def _marked(entry: MessageEntry, index: int, marks: str) -> Mapping[str, Any]:
    """Return the message with marks; remembered, as a message seldom changes its index."""
    known = entry.marked
    if known is None or known[0] != (index, marks):
        known = entry.marked = ((index, marks), with_marks(entry.normal, index, marks))
    return known[1]


def _around(parts: Iterable[Part]) -> list[str]:
    """Return the texts around the loops: before the first, between two, after the last."""
    texts: list[list[str]] = [[]]
    for part in parts:
        if isinstance(part, str):
            texts[-1].append(part)
        elif isinstance(part, Break):
            texts.append([])
    return ["".join(text) for text in texts]


def _texts(parts: Iterable[Part]) -> Iterator[str]:
    """Yield each fragment's text, and the texts between fragments joined."""
    around: list[str] = []
    for part in parts:
        if isinstance(part, str):
            around.append(part)
        elif isinstance(part, Placed):
            if around:
                yield "".join(around)
                around.clear()
            yield part.fragment.text
    yield "".join(around)


def _spans(parts: Iterable[Part], outside: Found) -> list[CharSpan] | None:
    """Return contents that occur in one place only; None if uncertain."""
    spans: list[CharSpan] = []
    seen: set[int] = set()
    twice = set(outside.marked)
    blocks: list[tuple[int, int, int]] = []  # of outside texts: offset there and here, length
    at = around = 0
    for part in parts:
        if isinstance(part, Placed):  # most are
            fragment, message = part
            if fragment.marked:
                (twice if message in seen else seen).add(message)
            if fragment.span is not None:
                start, end = fragment.span
                spans.append(CharSpan(message, at + start, at + end))
            at += len(fragment.text)
        elif isinstance(part, str):
            blocks.append((around, at, len(part)))
            around += len(part)
            at += len(part)
    if twice:
        spans = [span for span in spans if span.message not in twice]
    for span in outside.spans:
        start, end = _moved(span.start, blocks), _moved(span.end - 1, blocks) + 1
        if end - start != span.end - span.start:
            return None  # begins before a loop, and ends after it
        if span.message not in seen:
            spans.append(CharSpan(span.message, start, end))
    return sorted(spans, key=lambda span: span.start) if outside.spans else spans


def _moved(char: int, blocks: Sequence[tuple[int, int, int]]) -> int:
    """Return the prompt position of a character of the texts around the loops."""
    return next(at + char - begin for begin, at, length in blocks if begin <= char < begin + length)
