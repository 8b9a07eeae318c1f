"""Tables of agreement: compared answers, by group and arm. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from leyline_lab.fidelity.experiment import (
    Cell,
    Chart,
    Estimate,
    Record,
    ResultTable,
)
from leyline_lab.fidelity.statistics import mean, share

Row = tuple[Cell, ...]
More = Callable[[Sequence[Record], str], Row]

_REFERENCES = ("full", "re-prefill")
_SPLICE, _NAIVE = "splice", "no rotation"

NO_CONTROL = (
    "No control: this endpoint can't run without rotation, so nothing shows that these figures "
    "would notice a wrong splice."
)

COLUMNS = (
    "arm",
    "cases",
    "first = full",
    "first = full low",
    "first = full high",
    "first = re-prefill",
    "first = re-prefill low",
    "first = re-prefill high",
    "references differ",
    "then: full",
    "then: re-prefill",
    "then: neither",
    "whole answer = full",
    "tokens = full",
    "tokens = re-prefill",
    "tool calls",
    "tool = full",
    "KL full",
    "KL full low",
    "KL full high",
    "KL re-prefill",
    "L2 full",
    "L2 re-prefill",
    "L2 nearer",
    "top 10 = full",
    "top 10 = re-prefill",
)
"""Columns after a group's labels. A column with a ``low`` and a ``high`` after it has a two-sided
95 % interval."""


@dataclass(frozen=True, slots=True)
class Group:
    """Cases that are shown together."""

    labels: Row
    """Cells in front of the columns; the first is the model."""
    records: Sequence[Record]


def rows_of(
    groups: Sequence[Group],
    arms: Sequence[str],
    more: More = lambda records, arm: (),
) -> tuple[Row, ...]:
    """Return a row for each arm that was measured in a group.

    Args:
        more: cells after those of ``COLUMNS``, of a group's cases and an arm.
    """
    return tuple(
        (*group.labels, *_cells(group.records, arm), *more(group.records, arm))
        for group in groups
        for arm in arms
        if numbers(group.records, f"{arm}|full|first")
    )


def groups_of(
    records: Mapping[str, Record], labels: Iterable[Row], parts: int, at: Sequence[int]
) -> list[Group]:
    """Return a group for each row of labels, of the cases that have them in their names.

    Args:
        records: by name of the case, of so many parts between slashes.
        at: the place of each label among the parts.
    """
    named = [(case.rsplit("/", parts - 1), record) for case, record in records.items()]
    return [
        Group(row, [record for found, record in named if [found[i] for i in at] == list(row)])
        for row in labels
    ]


def agreement_table(
    of: tuple[str, str],
    labels: Row,
    groups: Sequence[Group],
    arms: Sequence[str],
    finding: str,
    *,
    paper: str = "",
    more: tuple[Row, More] = ((), lambda records, arm: ()),
) -> ResultTable:
    """Return the table of an experiment that compares answers.

    Args:
        of: the experiment's title and question.
        labels: columns in front of :data:`COLUMNS`.
        more: columns after them, and their cells of a group's cases and an arm.
    """
    title, question = of
    return ResultTable(
        title=title,
        question=question,
        columns=tuple(map(str, (*labels, *COLUMNS, *more[0]))),
        rows=rows_of(groups, arms, more[1]),
        finding=finding,
        paper=paper,
        chart=distance_chart(groups) if any(group.records for group in groups) else None,
    )


def numbers(records: Sequence[Record], key: str) -> list[float]:
    """Return a measure's values where it was measured."""
    values = (record.get(key) for record in records)
    return [float(value) for value in values if isinstance(value, int | float)]


def mean_of(records: Sequence[Record], key: str) -> float | None:
    """Return the mean of a measure; None if it wasn't measured."""
    values = numbers(records, key)
    return round(fmean(values), 6) if values else None


def rate(records: Sequence[Record], key: str) -> Estimate:
    """Return the share of cases in which a measure is 1."""
    values = numbers(records, key)
    return share(round(sum(values)), len(values))


def percent(estimate: Estimate) -> str:
    """Return a share with its interval, in words."""
    return f"{estimate.value:.0%} ({estimate.low:.0%} to {estimate.high:.0%})"


def summarise(groups: Sequence[Group]) -> str:
    """Return the finding: all cases in one line, then a line for each model."""
    cases = [record for group in groups for record in group.records]
    if not cases:
        return "No case was measured."
    naive = ""
    if _has_control(cases):
        naive = f", and without rotation in {percent(either(cases, _NAIVE))}"
    lines = [
        f"The splice begins like one of the references in {percent(either(cases, _SPLICE))} of "
        f"{len(cases)} cases{naive}. {_describe_followed(cases)} "
        f"{describe_control(cases)}"
    ]
    models = dict.fromkeys(str(group.labels[0]) for group in groups if group.records)
    for model in models:
        own = [each for group in groups if group.labels[0] == model for each in group.records]
        lines.append(describe(model, own))
    return "\n".join(lines)


def describe(model: str, records: Sequence[Record]) -> str:
    """Return one model's agreement in words."""
    splice, other = (rate(records, f"{_SPLICE}|{name}|first") for name in _REFERENCES)
    naive = ""
    if _has_control(records):
        share_of = percent(rate(records, f"{_NAIVE}|full|first"))
        naive = f"; without rotation like the whole history in {share_of}"
    return (
        f"{model}, {splice.count} cases: the splice begins like the whole history in "
        f"{percent(splice)}, like the edited prompt in {percent(other)}{naive}. "
        f"{_describe_followed(records)} {describe_control(records)}"
    )


def _has_control(records: Sequence[Record]) -> bool:
    return bool(numbers(records, f"{_NAIVE}|full|first"))


def _describe_followed(records: Sequence[Record]) -> str:
    differing = [record for record in records if record["differ"]]
    if not differing:
        return "The references begin alike everywhere, so nothing shows which one it follows."
    full, again = (
        round(sum(numbers(differing, f"{_SPLICE}|{name}|first"))) for name in _REFERENCES
    )
    return (
        f"Where the references differ ({len(differing)} cases), it follows the whole history "
        f"{full} times and the edited prompt {again} times."
    )


def either(records: Sequence[Record], arm: str) -> Estimate:
    """Return the share of cases in which an arm begins like one of the references."""
    like = [any(record[f"{arm}|{name}|first"] for name in _REFERENCES) for record in records]
    return share(sum(like), len(like))


def describe_control(records: Sequence[Record], arm: str = _SPLICE) -> str:
    """Return if the control is farther from both references than the splice.

    Logits are compared, as answers and probabilities may be equal by chance.

    Args:
        arm: the splice that differs from the control in the rotation alone.
    """
    keys = [f"{arm}|nearer|l2" for arm in (arm, _NAIVE)]
    both = [record for record in records if all(record.get(key) is not None for key in keys)]
    found = list(zip(*(numbers(both, key) for key in keys), strict=True))
    if not found:
        return NO_CONTROL
    splice, naive = (fmean(values) for values in zip(*found, strict=True))
    more = mean([two - one for one, two in found])
    figures = f"(L2 of the logits to the nearer reference: {naive:.3g}, splice {splice:.3g})"
    if more.value > 0 and more.low > 0:
        return f"The control without rotation is farther off, as it must be {figures}."
    if more.value > 0:
        return f"The control without rotation is farther off, but within the noise {figures}."
    return (
        f"The control without rotation is no farther off {figures}: this says nothing about "
        "rotation."
    )


def distance_chart(groups: Sequence[Group]) -> Chart:
    """Return bars of the mean distance to the nearer reference, and of that between the two."""
    shown = [group for group in groups if group.records]
    keys = {
        "full to re-prefill": "re-prefill|full|l2",
        "splice to the nearer": f"{_SPLICE}|nearer|l2",
        "no rotation to the nearer": f"{_NAIVE}|nearer|l2",
    }
    measured = {
        label: tuple(mean_of(group.records, key) for group in shown) for label, key in keys.items()
    }
    return Chart(
        kind="bar",
        x_label="",
        y_label="L2 of the first token's logits",
        x=tuple("\n".join(map(str, group.labels)) for group in shown),
        series={
            label: values
            for label, values in measured.items()
            if any(value is not None for value in values)
        },
    )


def _cells(records: Sequence[Record], arm: str) -> Row:
    differing = [record for record in records if record["differ"]]
    return (
        arm,
        len(records),
        *_interval(records, f"{arm}|full|first", shares=True),
        *_interval(records, f"{arm}|re-prefill|first", shares=True),
        len(differing),
        *_followed(differing, arm),
        mean_of(records, f"{arm}|full|same"),
        mean_of(records, f"{arm}|full|common"),
        mean_of(records, f"{arm}|re-prefill|common"),
        len(numbers(records, f"{arm}|full|tool")),
        mean_of(records, f"{arm}|full|tool"),
        *_interval(records, f"{arm}|full|kl", shares=False),
        mean_of(records, f"{arm}|re-prefill|kl"),
        mean_of(records, f"{arm}|full|l2"),
        mean_of(records, f"{arm}|re-prefill|l2"),
        mean_of(records, f"{arm}|nearer|l2"),
        mean_of(records, f"{arm}|full|top"),
        mean_of(records, f"{arm}|re-prefill|top"),
    )


def _followed(differing: Sequence[Record], arm: str) -> Row:
    """Return whom an arm's first token follows where the references differ, as shares."""
    full, again = (mean_of(differing, f"{arm}|{name}|first") for name in _REFERENCES)
    if full is None or again is None:
        return full, again, None
    return full, again, round(1 - full - again, 6)


def _interval(records: Sequence[Record], key: str, *, shares: bool) -> Row:
    values = numbers(records, key)
    if not values:
        return None, None, None
    found = rate(records, key) if shares else mean(values)
    return tuple(round(value, 6) for value in (found.value, found.low, found.high))
