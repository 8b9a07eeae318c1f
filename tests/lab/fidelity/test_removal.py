"""Removal on the replay engine: equal to the last bit, with a control that differs."""

from __future__ import annotations

from typing import Any

import pytest
from support.replay_engine import tiny_model

from leyline_lab.fidelity.experiment import Scale
from leyline_lab.fidelity.removal import DECODED, Removal
from leyline_replay.models.loader import LoadedModel


@pytest.mark.parametrize("kind", ["gqa", "mla"])
def test_nothing_is_left_of_a_forgotten_span(kind: str) -> None:
    """No logit of 64 decoded tokens differs, in fp32 and bf16; an amortized span leaves a trace."""
    tokenizer: Any = None
    removal = Removal([LoadedModel("a/tiny", tiny_model(kind), tokenizer, "f" * 32, "")])
    records = {case: removal.measure(case) for case in removal.cases(Scale.QUICK)}
    assert len(records) == 6
    for case, record in records.items():
        assert record["decoded"] == DECODED
        erased, difference = int(record["erased"] or 0), float(record["difference"] or 0.0)
        if case.startswith("control"):
            assert (erased, difference > 1e-4) == (0, True), case
        else:
            assert (erased > 0, difference) == (True, 0.0), case
    table = removal.table(records)
    assert "no logit differs" in table.finding
    broken = {case: {**record, "difference": 1.0} for case, record in records.items()}
    assert "NOT exact" in removal.table(broken).finding
