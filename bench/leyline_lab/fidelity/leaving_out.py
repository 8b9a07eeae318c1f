"""Experiments of an engine that copies only longer texts: cases without a copy are left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from leyline_lab.errors import NothingCopiedError
from leyline_lab.fidelity.experiment import (
    Experiment,
    Record,
    ResultTable,
    Scale,
)

_NOT_COPIED = "nothing_copied"


class LeavingOut:
    """An experiment whose cases may have nothing to copy; its finding counts them.

    Args:
        experiment: the one that measures.
    """

    def __init__(self, experiment: Experiment) -> None:
        self.name = experiment.name
        self.title = experiment.title
        self._experiment = experiment

    def cases(self, scale: Scale) -> Sequence[str]:
        """Return all cases."""
        return self._experiment.cases(scale)

    def measure(self, case: str) -> Record:
        """Measure one case, or note that it is left out."""
        try:
            return self._experiment.measure(case)
        except NothingCopiedError:
            return {_NOT_COPIED: 1}

    def table(self, records: Mapping[str, Record]) -> ResultTable:
        """Return the table of the others."""
        used = {case: each for case, each in records.items() if _NOT_COPIED not in each}
        table = self._experiment.table(used)
        left_out = len(records) - len(used)
        if not left_out:
            return table
        cases = "1 case is" if left_out == 1 else f"{left_out} cases are"
        said = f"{cases} left out: too little follows the edit, so the engine copies nothing."
        return msgspec.structs.replace(table, finding=f"{table.finding}\n{said}")
