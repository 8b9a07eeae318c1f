"""The engine's splices over larger pages against the contract computed the long way round."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from oracle_cases import ci_seeds, draw_case, nightly_seeds, single_edit_case
from oracle_check import BOUND, CONTROL_FACTOR, check_receipt, play
from oracle_models import MODEL_NAMES, OracleModel

Models = Callable[[str], OracleModel]

PAGES = (16, 64)
_SHIFTS = ((1, -64), (2, 17), (3, -5))


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize(
    "name", ["qwen3", pytest.param("deepseek-v3-yarn", marks=pytest.mark.nightly)]
)
def test_random_edits_give_the_contracts_logits_page_by_page(
    name: str, page: int, oracle_model: Models
) -> None:
    """Random conversations agree in logits and token counts: whole pages are kept, no others."""
    spliced = 0
    for seed in ci_seeds(name):
        _, *edited = play(oracle_model(name), draw_case(seed), page=page)
        for compared in edited:
            check_receipt(compared)
            assert compared.error <= BOUND, f"seed {seed}: {compared.error:.1e}"
            spliced += compared.receipt.tokens.spliced
    assert spliced > page


@pytest.mark.nightly
@pytest.mark.parametrize("page", [16, 32, 64, 128])
@pytest.mark.parametrize("name", MODEL_NAMES)
def test_many_random_edits_give_the_contracts_logits_page_by_page(
    name: str, page: int, oracle_model: Models
) -> None:
    """The same over all models and many other conversations."""
    for seed in nightly_seeds(name, 0):
        _, *edited = play(oracle_model(name), draw_case(seed), page=page)
        for compared in edited:
            check_receipt(compared)
            assert compared.error <= BOUND, f"seed {seed}: {compared.error:.1e}"


@pytest.mark.parametrize("how", ["none", "no_rotation", "off_by_one"])
@pytest.mark.parametrize("name", ["qwen3", "deepseek-v3-yarn"])
def test_a_wrong_rotation_over_pages_is_far_outside_the_bound(
    name: str, how: str, oracle_model: Models
) -> None:
    """Keys of copied pages that aren't moved, or by one position too much, show in the logits."""
    for seed, delta in _SHIFTS:
        _, edited = play(oracle_model(name), single_edit_case(seed, delta), how, page=16)
        assert edited.receipt.tokens.spliced > 100
        if how == "none":
            assert edited.error <= BOUND
        else:
            assert edited.error >= CONTROL_FACTOR * BOUND
