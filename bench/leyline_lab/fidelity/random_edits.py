"""Edits anywhere: random spans of one prompt, replaced by shorter and longer stubs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle, islice, pairwise, product
from random import Random

from leyline_engine.contract import Directive, Mode
from leyline_lab.fidelity.agreement import (
    agreement_table,
    either,
    groups_of,
    percent,
    summarise,
)
from leyline_lab.fidelity.comparison import (
    NAIVE,
    REPREFILL,
    SPLICE,
    compare_all,
    edited_answers,
)
from leyline_lab.fidelity.experiment import Record, ResultTable, Scale, SessionStep
from leyline_lab.fidelity.rendering import Rendered, Span
from leyline_lab.fidelity.subject import Subject

_ARMS = (REPREFILL, SPLICE, NAIVE)
_PLACES = ("boundary", "anywhere")
_STUBS = ("random", "semantic")
_SIGNS = ("shorter", "longer")
_SHORTEST, _LONGEST = 8, 200
_PLACEHOLDER = "[This part of the conversation was removed.]\n"
_MARGIN = 8
"""Tokens that stay at the prompt's beginning and end."""

_PAPER = (
    "Appendix E, table 5, 40 trials at random places. First token like the whole history / like "
    "re-prefill, and follows the whole history where these differ, random stubs: DeepSeek-V2-Lite "
    "40/40, 40/40, none differ; Moonlight 37/40, 23/40, 14/17; JoyAI-LLM Flash 0/40, 10/40, 0/10; "
    "GLM-4.7-Flash 1/40, 6/40, 1/23. Semantic stubs: 40/40, 40/40, none; 38/40, 27/40, 11/13; "
    "0/40, 20/40, 0/20; 2/40, 2/40, 2/28. The models are others."
)


class RandomEdits:
    """Edits one prompt of a session at random.

    Spans have 8 to 200 tokens; one or two at once; δ negative and positive; at the bounds of
    messages and anywhere.

    Args:
        step: the request whose whole history is edited.
    """

    name = "random_edits"
    title = "Random edits"

    def __init__(self, subjects: Sequence[Subject], step: SessionStep) -> None:
        self._subjects = {subject.name: subject for subject in subjects}
        self._step = step
        self._prompts: dict[str, Rendered] = {}

    def cases(self, scale: Scale) -> Sequence[str]:
        """Return ``MODEL/PLACE/STUB/SIGN/EDITS/TRIAL``."""
        trials = range(1 if scale is Scale.QUICK else 5)
        kinds = list(product(_PLACES, _STUBS, _SIGNS, (1, 2)))
        if scale is Scale.QUICK:
            # Half of them: each place with each stub, sign and number of edits.
            kinds = [kind for index, kind in enumerate(kinds) if (index + index // 4) % 2 == 0]
        return [
            "/".join(map(str, (name, *kind, trial)))
            for name, kind, trial in product(self._subjects, kinds, trials)
        ]

    def measure(self, case: str) -> Record:
        """Draw the edits of a case, and answer in every way."""
        name, place, stub, sign, edits, trial = case.rsplit("/", maxsplit=5)
        subject = self._subjects[name]
        prompt = self._prompt(subject)
        rng = Random(f"{place}/{stub}/{sign}/{edits}/{trial}")
        spans = draw_spans(rng, prompt, int(edits), inside=place == "boundary")
        drawn = [
            Directive(start, end, _stub(rng, subject, stub, sign, end - start), Mode.AMORTIZE)
            for start, end in spans
        ]
        delta = sum(edit.delta for edit in drawn)
        compared = compare_all(edited_answers(subject, prompt.tokens, drawn))
        return {"edits": len(drawn), "delta": delta, **compared}

    def table(self, records: Mapping[str, Record]) -> ResultTable:
        """Return agreement by model, place and kind of stub."""
        labels = product(self._subjects, _PLACES, _STUBS)
        groups = groups_of(records, labels, 6, (0, 1, 2))
        question = (
            "Does the splice hold for any edit: spans of 8 to 200 tokens, one or two at once, "
            "shorter and longer replacements, with and without meaning, at the bounds of "
            "messages and across them?"
        )
        finding = f"{summarise(groups)}\n{_by_kind(records)}"
        columns = ("model", "place", "stub")
        return agreement_table(
            (self.title, question), columns, groups, _ARMS, finding, paper=_PAPER
        )

    def _prompt(self, subject: Subject) -> Rendered:
        if subject.name not in self._prompts:
            self._prompts[subject.name] = subject.render(self._step.messages, self._step.tools)
        return self._prompts[subject.name]


def draw_spans(rng: Random, prompt: Rendered, count: int, *, inside: bool) -> list[Span]:
    """Draw spans in order, without overlap and with a token between them.

    Args:
        inside: True for spans that begin where a message's content begins.
    """
    last = len(prompt.tokens) - _MARGIN
    contents = [(start, min(end, last)) for start, end in filter(None, prompt.contents)]
    longs = [
        (start, end) for start, end in contents if start >= _MARGIN and end - start >= _SHORTEST
    ]
    bounds = rng.sample(longs, k=min(count, len(longs))) if inside else []
    while True:
        sizes = [
            rng.randint(_SHORTEST, min(_LONGEST, (last - _MARGIN) // (2 * count)))
            for _ in range(count)
        ]
        spans = [
            (start, min(end, start + size))
            for (start, end), size in zip(bounds, sizes, strict=False)
        ]
        for size in sizes[len(spans) :]:
            start = rng.randint(_MARGIN, last - size)
            spans.append((start, start + size))
        spans.sort()
        if all(one[1] < two[0] for one, two in pairwise(spans)):
            return spans


def _stub(rng: Random, subject: Subject, kind: str, sign: str, span: int) -> tuple[int, ...]:
    """Return a replacement that is shorter or longer than the span."""
    length = rng.randint(0, span - 1) if sign == "shorter" else rng.randint(span + 1, 2 * span)
    if kind == "semantic":
        return tuple(islice(cycle(subject.encode(_PLACEHOLDER)), length))
    ordinary = subject.ordinary
    return tuple(rng.choice(ordinary) for _ in range(length))


def _by_kind(cases: Mapping[str, Record]) -> str:
    """Return the splice's agreement with either reference, by sign and by place."""
    parts = []
    for kind in (*_SIGNS, *_PLACES):
        chosen = [record for case, record in cases.items() if f"/{kind}/" in case]
        if chosen:
            parts.append(f"{kind} {percent(either(chosen, SPLICE))}")
    return f"The splice begins like one of the references, by kind of edit: {', '.join(parts)}."
