"""Chained edits and storage in bf16: bounds that hold, with controls that break them."""

from __future__ import annotations

from math import sqrt

import pytest

from leyline_lab.fidelity.chained_rotations import SHAPES, ChainedRotations
from leyline_lab.fidelity.experiment import Scale
from leyline_lab.fidelity.storage_floor import DELTAS, POSITIONS, StorageFloor


@pytest.mark.parametrize("shape", SHAPES)
def test_chained_edits_do_not_drift(shape: str) -> None:
    """A hundred edits are as exact as one, in both dtypes; turning rounded keys again is not."""
    chains = ChainedRotations()
    assert set(chains.cases(Scale.QUICK)) < set(chains.cases(Scale.FULL))
    for dtype, bound in (("float32", 3e-6), ("bfloat16", 3e-2)):
        ours = chains.measure(f"{shape}/{dtype}/leyline/100")
        naive = chains.measure(f"{shape}/{dtype}/naive/100")
        assert float(ours["100"] or 1) < bound
        assert float(naive["100"] or 0) > 3 * float(ours["100"] or 1)


def test_the_chained_table_has_the_longest_chains() -> None:
    """Rows are forms, dtypes and ways; a cell that wasn't measured is empty."""
    chains = ChainedRotations()
    cases = [case for case in chains.cases(Scale.QUICK) if "MLA" in case]
    table = chains.table({case: chains.measure(case) for case in cases})
    assert table.columns[3:] == ("1 edits", "10 edits", "100 edits")
    assert len(table.rows) == len(cases) == 4
    assert table.chart is not None
    assert table.chart.x == (1, 10, 100)


def test_a_moved_key_is_at_the_floor_of_its_storage() -> None:
    """Two roundings instead of one, wherever the key was, and however far it went."""
    floor = StorageFloor()
    records = {case: floor.measure(case) for case in floor.cases(Scale.QUICK)}
    assert len(records) == 2 * len(POSITIONS) * len(DELTAS)
    table = floor.table(records)
    for _, once, rotated, worst, naive in table.rows:
        assert isinstance(once, float) and isinstance(rotated, float)
        assert 1.2 * once < rotated < 1.1 * sqrt(2) * once + 1e-3
        assert float(worst or 0) < 6e-3
        assert float(naive or 0) > 0.3
