"""An agent's conversation as an engine sees it: messages of known names that are edited."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from leyline_engine.contract import (
    Directive,
    EditPayload,
    LineageRun,
    Mode,
    SourceRef,
    SpanLabel,
    output_span,
    token_digest,
)

MESSAGE = 340
"""Tokens of a message."""
STUB = 20
"""Tokens that take an edited message's place."""
SCOPE = "tenant"


@dataclass(frozen=True, slots=True)
class Message:
    """A named part of a prompt."""

    name: str
    tokens: array[int]


class Talk:
    """One session; each turn continues the one before.

    Args:
        session: its name.
        length: tokens of its prompts.
        seed: makes its texts its own.
        vocabulary: bound of the token ids.
    """

    def __init__(self, session: str, length: int, seed: int, vocabulary: int) -> None:
        self.session, self.length = session, length
        self._rng = np.random.default_rng(seed)
        self._vocabulary = vocabulary
        self._written = 0
        self.turn = 0
        self.lineage: tuple[LineageRun, ...] = ()
        self._messages: list[Message] = []
        self._fill()

    def _text(self, length: int) -> Message:
        self._written += 1
        ids = self._rng.integers(10, self._vocabulary, length)
        return Message(f"{self.session}.{self._written}", array("q", ids.tolist()))

    def _fill(self) -> None:
        missing = self.length - sum(len(message.tokens) for message in self._messages)
        while missing > 0:
            self._messages.append(self._text(min(MESSAGE, missing)))
            missing -= MESSAGE

    def prompt(self) -> array[int]:
        """Return the present prompt."""
        found = array("q")
        for message in self._messages:
            found.extend(message.tokens)
        return found

    def _labels(self) -> tuple[SpanLabel, ...]:
        labels, start = [], 0
        for message in self._messages:
            labels.append(SpanLabel(message.name, start, start + len(message.tokens)))
            start += len(message.tokens)
        return tuple(labels)

    def opens(self) -> EditPayload:
        """Return the payload of a turn that edits nothing."""
        self.turn += 1
        return EditPayload(
            session=self.session,
            scope=SCOPE,
            turn=f"t{self.turn}",
            lineage=self.lineage,
            spans=self._labels(),
        )

    def answered(self, tokens: Sequence[int], lineage: Sequence[LineageRun]) -> None:
        """Continue after an answer."""
        self._messages.append(Message(output_span(f"t{self.turn}"), array("q", tokens)))
        self.lineage = tuple(lineage)

    def edits(self, count: int, mode: Mode = Mode.AMORTIZE) -> EditPayload:
        """Replace ``count`` messages after the first quarter by stubs; returns the payload.

        New messages follow, so that the prompt keeps its length.
        """
        source = self.prompt()
        starts = np.cumsum([0, *(len(message.tokens) for message in self._messages)])
        first = int(np.searchsorted(starts, len(source) // 4))
        editable = [
            index
            for index, message in enumerate(self._messages)
            if index >= first and len(message.tokens) >= STUB
        ]
        chosen = [editable[len(editable) * each // (2 * count)] for each in range(count)]
        directives = []
        for index in chosen:
            stub = self._text(STUB)
            cut = (int(starts[index]), int(starts[index + 1]))
            directives.append(Directive(*cut, tuple(stub.tokens), mode=mode))
            self._messages[index] = stub
        self._fill()
        wanted = SourceRef(f"t{self.turn}", len(source), token_digest(source))
        payload = self.opens()
        return EditPayload(
            session=payload.session,
            scope=payload.scope,
            turn=payload.turn,
            lineage=payload.lineage,
            spans=payload.spans,
            sources=(wanted,),
            directives=tuple(directives),
        )

    def appends(self) -> EditPayload:
        """Add a message; returns the payload of a turn that edits nothing."""
        self._messages.append(self._text(MESSAGE))
        return self.opens()
