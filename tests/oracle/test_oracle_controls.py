"""Wrong splices must show: an oracle that passes them would prove nothing.

The engine's rotary is replaced from outside by one that is wrong in a single way. The toy
models' attention is wide enough that each way shows at every shift tried, |δ| = 1 included; the
weakest was a llama3-scaled model whose scaling is ignored at |δ| = 1, at 1.6e-2 of the largest
logit. With the usual initialisation (std 0.02) most would hide.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from oracle_cases import single_edit_case
from oracle_check import BOUND, CONTROL_FACTOR, play
from oracle_engine import TAMPERINGS
from oracle_models import MODEL_NAMES, OracleModel

Models = Callable[[str], OracleModel]

_FACTORED = ("deepseek-v2-yarn", "deepseek-v3-yarn", "llama-yarn")
_SCALED = ("llama-linear", "llama-llama3", *_FACTORED)
_ONLY_FOR = {"scaling_ignored": _SCALED, "scaled_twice": _FACTORED}

CONTROLS = [
    (name, how)
    for name in MODEL_NAMES
    for how in TAMPERINGS
    if how != "none" and name in _ONLY_FOR.get(how, MODEL_NAMES)
]


def smallest_error(subject: OracleModel, how: str) -> float:
    """The least that a tampering is off by, over shifts both ways."""
    return min(play(subject, single_edit_case(seed, d), how)[1].error for seed, d in _SHIFTS)


_SHIFTS = ((1, -64), (2, 17))


@pytest.mark.parametrize(("name", "how"), CONTROLS)
def test_a_wrong_rotation_is_far_outside_the_bound(
    name: str, how: str, oracle_model: Models
) -> None:
    """Keys moved wrongly are off by at least a hundred times the bound."""
    assert smallest_error(oracle_model(name), how) >= CONTROL_FACTOR * BOUND


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_a_right_rotation_put_in_from_outside_passes(name: str, oracle_model: Models) -> None:
    """The tampering as such does no harm: with a right rotation the bound holds."""
    subject = oracle_model(name)
    for seed, delta in _SHIFTS:
        assert play(subject, single_edit_case(seed, delta), "none")[1].error <= BOUND
