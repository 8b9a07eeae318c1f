"""Random sessions on a vLLM engine of this process: edits, forgets, retires, aborts, branches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Any

from splice_kit import Answer, SplicingEngine

from leyline_engine.contract import (
    ATTENTION_SINK,
    Directive,
    EditPayload,
    LineageRun,
    Mode,
    SpanLabel,
    apply_directives,
)

SCOPES = ("soak", "other")
_LONGEST = 700
_BRANCHES = 4
_AT_ONCE = 6
_OPENING = tuple(range(100, 100 + ATTENTION_SINK + 40))
"""Beginning of all conversations."""


@dataclass(frozen=True)
class Kept:
    """A finished turn, as a proxy retains it."""

    name: str
    answer: Answer
    lineage: tuple[LineageRun, ...]
    spans: tuple[SpanLabel, ...]


@dataclass
class Session:
    """One conversation that takes random turns."""

    name: str
    scope: str
    rng: Random
    tally: Counter[str]
    kept: list[Kept] = field(default_factory=list)
    past: list[str] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=lambda: count(1))

    def turn(self) -> tuple[tuple[int, ...], EditPayload]:
        """The next prompt and its payload: an opening, an append, an edit, a forget or a branch."""
        if not self.kept or len(self.kept[-1].answer.tokens) > _LONGEST or self._chance(0.04):
            self.kept = []
            base: tuple[int, ...] = _OPENING
            members: dict[str, Any] = {"spans": (SpanLabel("opening", 0, len(base)),)}
        else:
            base, members = self._continued(self.kept[-1])
        added = self._text(self.rng.randint(1, 90))
        number = next(self.numbers)
        label = SpanLabel(f"{self.name} {number}", len(base), len(base) + len(added))
        members["spans"] = (*members["spans"], label)
        turn = f"t{number}"
        if len(self.past) > 1 and self._chance(0.1):
            # Later turns may still draw on those that are kept.
            members["retire"] = tuple(self.past[:-_BRANCHES])
            self.tally["retires"] += bool(members["retire"])
        self.past = [*self.past[-20:], turn]
        payload = EditPayload(session=self.name, scope=self.scope, turn=turn, **members)
        return (*base, *added), payload

    def _continued(self, last: Kept) -> tuple[tuple[int, ...], dict[str, Any]]:
        if self._chance(0.2):
            last = self.rng.choice(self.kept)
            self.tally["branches"] += 1
        tokens, forget = last.answer.tokens, ()
        directives: tuple[Directive, ...] = ()
        if self._chance(0.15) and len(last.spans) > 1:
            label = self.rng.choice(last.spans[1:])
            directives = (Directive(label.start, label.end, (), Mode.FORGET),)
            forget = (label.span,)
            self.tally["forgets"] += 1
            # A proxy draws on no older turn after a forget.
            self.kept = [last]
        elif self._chance(0.7):
            directives = self._cuts(len(tokens))
            self.tally["edits"] += 1
        members: dict[str, Any] = {"lineage": last.lineage, "forget": forget}
        if directives:
            members |= {"sources": (last.answer.ref(last.name),), "directives": directives}
        members["spans"] = _moved(last.spans, directives)
        return tuple(apply_directives(tokens, directives)), members

    def _cuts(self, length: int) -> tuple[Directive, ...]:
        places = sorted(self.rng.sample(range(ATTENTION_SINK, length), 2 * self.rng.randint(1, 2)))
        return tuple(
            Directive(start, end, self._text(self.rng.choice((0, 0, 3, 70))))
            for start, end in zip(places[::2], places[1::2], strict=True)
        )

    def _text(self, length: int) -> tuple[int, ...]:
        return tuple(self.rng.choices(range(200, 4000), k=length))

    def _chance(self, share: float) -> bool:
        return self.rng.random() < share

    def ended(self, payload: EditPayload, answer: Answer) -> None:
        """Learn what a proxy learns of a turn that ended."""
        assert answer.record is not None and answer.record.finished
        receipt = answer.record.receipt
        counts = receipt.tokens
        assert counts.prompt == counts.served + counts.prefilled == len(answer.prompt)
        self.tally[receipt.outcome.value] += 1
        if payload.forget:
            self.tally["forgot"] += receipt.forgot is not None
        if receipt.turn:
            kept = Kept(receipt.turn, answer, receipt.lineage, payload.spans)
            self.kept = [*self.kept[1 - _BRANCHES :], kept]
        else:
            self.kept = []


def _moved(spans: Sequence[SpanLabel], directives: Sequence[Directive]) -> tuple[SpanLabel, ...]:
    """The labels of what is left of their spans as a whole, at their new places."""
    found = []
    for label in spans:
        touched = [d for d in directives if d.start < label.end and label.start < d.end]
        if not touched:
            shift = sum(d.delta for d in directives if d.end <= label.start)
            found.append(SpanLabel(label.span, label.start + shift, label.end + shift))
    return tuple(found)


class Steps:
    """Steps of an engine, with the answers of all requests that end in them."""

    def __init__(self, engine: SplicingEngine) -> None:
        self._engine = engine
        self._done: dict[str, Any] = {}

    def once(self) -> None:
        """Take one step."""
        for output in self._engine.llm.llm_engine.step():
            if output.finished:
                self._done[output.request_id] = output

    def answers(self, names: Sequence[str]) -> list[Answer]:
        """Step until these requests have ended, and nothing is left to be overwritten."""
        while not set(names) <= self._done.keys():
            assert self._engine.scheduler.has_requests(), "a request was lost"
            self.once()
        self._engine.settle()
        return [self._engine._answer(name, self._done.pop(name)) for name in names]


def soak(engine: SplicingEngine, *, sessions: int, turns: int, seed: int) -> Counter[str]:
    """Run random turns, several at once; returns counts of all that happened."""
    rng, tally, steps = Random(seed), Counter[str](), Steps(engine)
    talks = [
        Session(f"{seed} {n}", SCOPES[n % len(SCOPES)], Random(f"{seed} {n}"), tally)
        for n in range(sessions)
    ]
    while tally["turns"] < turns:
        running: dict[str, tuple[Session, EditPayload]] = {}
        others: list[str] = []
        if rng.random() < 0.1:
            others.append(engine.start(rng.choices(range(200, 4000), k=90), decode=2))
            tally["strangers"] += 1
        aborted: list[str] = []
        for talk in rng.sample(talks, rng.randint(1, min(_AT_ONCE, sessions))):
            prompt, payload = talk.turn()
            name = engine.start(prompt, payload, decode=rng.choice((1, 3, 8)))
            tally["turns"] += 1
            if rng.random() < 0.1:
                aborted.append(name)
                talk.kept = []
            else:
                running[name] = (talk, payload)
        for _ in range(rng.randrange(4) if aborted else 0):
            steps.once()
        engine.llm.llm_engine.abort_request(aborted)
        tally["aborts"] += len(aborted)
        for answer in steps.answers([*running, *others]):
            if answer.message in running:
                talk, payload = running[answer.message]
                talk.ended(payload, answer)
        engine.sent.records.clear()
        engine.held.clear()
    return tally
