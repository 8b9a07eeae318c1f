"""Texts that models wrote in a session, and the messages that each had read. Pure; names only.

A text is an answer, a text that a model wrote for a policy, or a message of the client's list that
a model may have written elsewhere. A message is known to be read by the turns whose prompt held it,
stored as runs of their numbers::

    turn 0  result t0-a.3              read by turns 0 to 1
    turn 1  result, answer t0-a.out    t1-b.out has read the result: direct
    turn 2  answer, answer t1-b.out    t2-c.out has read what has read it: transitive

Where a prompt's KV may remember more than the prompt shows, its answer has read all that earlier
turns had. So a wrong answer names a text too many.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from leyline_engine.contract import output_span

from .prepared import Prepared
from .spans import ANYTHING, SpanNames, turn_index

MAX_TEXTS = 1024
MAX_READ = 8192
"""Largest numbers of texts, and of messages whose readers are remembered."""

MAX_RUNS = 8
"""Largest number of runs per message; of more, the last two become one."""

Runs = tuple[tuple[int, int], ...]
"""Half-open runs of turn numbers, in order."""

TextKind = Literal["answer", "policy", "message"]


@dataclass(frozen=True, slots=True)
class Text:
    """A text that a model wrote, or may have written."""

    name: str
    """Its name in the session's ledger."""
    index: int
    """Number of the turn that wrote it; of a message, of the turn that brought it."""
    kind: TextKind = "answer"
    role: str = "assistant"
    hidden: bool = False
    """True if the KV that it was written from may remember more than the prompt showed."""
    former: tuple[str, ...] = ()
    """Texts that this message may have been."""
    key: str = ""
    """The policy's question."""
    forgotten: bool = False
    """True if its own forget was demanded already."""

    @property
    def strange(self) -> bool:
        """True if the proxy doesn't know who wrote it."""
        return self.kind == "message" and (self.role == "assistant" or ANYTHING in self.former)


@dataclass(frozen=True, slots=True)
class Readings:
    """The texts of a session and their readings; bounded."""

    texts: tuple[Text, ...] = ()
    """Oldest first."""
    read: Mapping[str, Runs] = field(default_factory=dict)
    """Turns whose prompt held a message, by its name."""
    before: int = 0
    """Not every text that was written in turns before this number is known."""

    @property
    def size(self) -> int:
        """Number of names."""
        return len(self.read) + sum(1 + len(text.former) for text in self.texts)

    def after(
        self,
        turn: str,
        index: int,
        prepared: Prepared,
        names: SpanNames,
        *,
        hidden: bool,
        answers: bool = True,
        key: str = "",
    ) -> Readings:
        """Return the readings after a turn.

        Args:
            turn: its name.
            index: its number, above that of any turn here.
            names: of its messages.
            hidden: as :attr:`Text.hidden`.
            answers: True if its answer has a name in the session's ledger.
            key: the policy's question that it answers; empty for an answer to the client.
        """
        known = {text.name for text in self.texts}
        texts = (*self.texts, *_strangers(index, prepared, names, known))
        if answers:
            own = Text(output_span(turn), index, hidden=hidden)
            if key:
                own = replace(own, kind="policy", role="policy", key=key)
            texts = (*texts, own)
        read = dict(self.read)
        for name in _sent(prepared, names):
            read[name] = _extended(read.get(name, ()), index)
        return replace(self, texts=texts, read=read)._bounded()

    def written(self, name: str, turn: str, key: str) -> Readings:
        """Return the readings with a text that a model wrote for a policy from a turn's messages.

        Args:
            name: the text's.
            turn: name of the turn whose policy asked.
            key: the policy's question.
        """
        asked = next((text for text in self.texts if text.name == output_span(turn)), None)
        if asked is None:
            return self.lose(max((text.index for text in self.texts), default=self.before))
        text = Text(name, asked.index, "policy", "policy", asked.hidden, key=key)
        return replace(self, texts=(*self.texts, text))._bounded()

    def lose(self, index: int) -> Readings:
        """Return the readings after a turn of this number whose text has no name here."""
        return replace(self, before=max(self.before, index + 1))

    def forget(self, names: Collection[str]) -> Readings:
        """Return the readings after texts of these names were to be forgotten themselves."""
        if not any(text.name in names and not text.forgotten for text in self.texts):
            return self
        texts = (replace(t, forgotten=t.forgotten or t.name in names) for t in self.texts)
        return replace(self, texts=tuple(texts))

    def knows(self, name: str) -> Text | None:
        """Return the text of a name; None if there is none."""
        return next((text for text in self.texts if text.name == name), None)

    def came(self, name: str) -> int | None:
        """Return the number of the turn that brought or wrote a message; None if it isn't known."""
        text = self.knows(name)
        return text.index if text is not None else turn_index(name)

    def comes_before(self, name: str, text: Text) -> bool:
        """Return True if a message may have been there when one of the client's was written."""
        first = self.came(name)
        if first is None or first != text.index:
            return first is None or first < text.index
        turn, _, place = name.rpartition(".")
        of, _, own = text.name.rpartition(".")
        if turn != of:
            return True  # a concurrent turn brought it
        if not place.isdecimal():
            return False  # the turn's own answer
        return not own.isdecimal() or int(place) < int(own)

    def _bounded(self) -> Readings:
        """Return the readings without the oldest, where they are too many."""
        texts, read, before = self.texts, self.read, self.before
        if len(texts) > MAX_TEXTS:
            gone, texts = texts[:-MAX_TEXTS], texts[-MAX_TEXTS:]
            before = max(before, *(text.index + 1 for text in gone))
        if len(read) > MAX_READ:
            order = sorted(read, key=lambda name: read[name][-1][1])
            gone_names = order[: len(read) - MAX_READ * 3 // 4]
            before = max(before, *(read[name][-1][1] for name in gone_names))
            read = {name: read[name] for name in read.keys() - set(gone_names)}
        return replace(self, texts=texts, read=read, before=before)


def _strangers(
    index: int, prepared: Prepared, names: SpanNames, known: Collection[str]
) -> Iterable[Text]:
    """Yield new messages that a model may have written."""
    for place, name in enumerate(names.client):
        if name.id in known:
            continue
        role = str(prepared.client[place].get("role", ""))
        former = tuple(each for each in name.former if each in known or each == ANYTHING)
        if role == "assistant" or former:
            yield Text(name.id, index, "message", role[:32], former=former)


def _sent(prepared: Prepared, names: SpanNames) -> Iterable[str]:
    """Yield the names of the texts that the prompt holds, without those that a stub replaces."""
    for entry, told in zip(prepared.sent, names.sent, strict=True):
        place = entry.client_index
        yield from told[1:] if place in prepared.quarantined else told


def _extended(runs: Runs, index: int) -> Runs:
    if runs and runs[-1][1] >= index:
        return (*runs[:-1], (runs[-1][0], index + 1))
    if len(runs) == MAX_RUNS:
        return (*runs[:-1], (runs[-1][0], index + 1))
    return (*runs, (index, index + 1))
