"""The sweep over models' rotary parameters, against two computations, and with a control."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from leyline_engine.rotary.rotation import Pairing, Rotary
from leyline_lab.fidelity.experiment import Scale
from leyline_lab.fidelity.rotary_models import MODELS, RotaryModel
from leyline_lab.fidelity.rotary_sweep import RotarySweep, library_frequencies, rope


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_the_formulas_agree_with_the_library(model: RotaryModel) -> None:
    """Frequencies by the papers' formulas are those that models run with, but for rounding."""
    found = library_frequencies(model).double().numpy()
    assert found == pytest.approx(model.frequencies(), rel=3e-6)


def test_a_rotated_key_is_the_model_s_own() -> None:
    """For all models, fp32 and bf16 stay within rounding; a key that isn't rotated does not."""
    sweep = RotarySweep()
    cases = sweep.cases(Scale.QUICK)
    assert set(cases) < set(sweep.cases(Scale.FULL))
    records = {case: sweep.measure(case) for case in cases}
    for record in records.values():
        assert float(record["worst_rotated"] or 1) < 2e-6
        assert float(record["worst_rotated_bf16"] or 1) < 8e-3
        assert float(record["median_rotated_bf16"] or 1) < 6e-3
        assert float(record["worst_naive"] or 0) > 0.5
    table = sweep.table(records)
    assert [row[0] for row in table.rows] == [model.name for model in MODELS]
    assert table.chart is not None
    assert all(len(line) == len(MODELS) for line in table.chart.series.values())


@pytest.mark.parametrize("pairing", list(Pairing))
def test_the_reference_is_rope(pairing: Pairing) -> None:
    """RoPE keeps lengths, and products of two keys depend on their distance alone."""
    rng = np.random.default_rng(3)
    frequencies = 1e4 ** -(np.arange(0, 16, 2) / 16)
    one, other = rng.standard_normal((2, 4, 16))
    near = (rope(one, frequencies, 7, pairing) * rope(other, frequencies, 19, pairing)).sum(-1)
    far = (rope(one, frequencies, 1007, pairing) * rope(other, frequencies, 1019, pairing)).sum(-1)
    assert near == pytest.approx(far)
    moved = torch.from_numpy(rope(one, frequencies, 5, pairing)).float()[:, None]
    at = [torch.full((4,), position) for position in (5, 900)]
    turned = Rotary(torch.from_numpy(frequencies).float(), pairing).rotate(moved, *at)[:, 0]
    assert turned.numpy() == pytest.approx(rope(one, frequencies, 900, pairing), abs=1e-3)
