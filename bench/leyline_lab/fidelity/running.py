"""A run of experiments: cases are measured in order, noted in a journal, and made into tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from leyline_lab.fidelity.experiment import Experiment, Scale
from leyline_lab.fidelity.journal import Journal


def count_left(experiments: Sequence[Experiment], journal: Journal, scale: Scale) -> int:
    """Return how many cases aren't measured yet."""
    return sum(
        case not in journal.of(each.name) for each in experiments for case in each.cases(scale)
    )


def measure_all(
    experiments: Sequence[Experiment],
    journal: Journal,
    scale: Scale,
    advance: Callable[[str], None],
) -> dict[str, Any]:
    """Measure what the journal lacks, and return all tables by name, as JSON.

    Args:
        advance: called with the experiment's title after each case.
    """
    tables: dict[str, Any] = {}
    for each in experiments:
        cases = each.cases(scale)
        for case in cases:
            if case not in journal.of(each.name):
                journal.add(each.name, case, each.measure(case))
                advance(each.title)
        known = journal.of(each.name)
        tables[each.name] = msgspec.to_builtins(each.table({case: known[case] for case in cases}))
    return tables
