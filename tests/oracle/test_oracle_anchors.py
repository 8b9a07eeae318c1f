"""Models that keep state per sequence, against both contracts computed the long way round.

Rows that a window has dropped are no numbers here: whoever read one would answer nothing else.
"""

from __future__ import annotations

import random
from functools import lru_cache

import pytest
from oracle_anchors import (
    RECURRENT,
    UNTURNED,
    WINDOWED,
    AnchoredConversation,
    anchored_engine,
    anchored_model,
    draw,
    play_session,
    shorten_windows,
    tamper_state,
)
from oracle_check import BOUND, CONTROL_FACTOR
from oracle_engine import Edit, tamper
from oracle_models import OracleModel, randomized
from transformers import JambaConfig

from leyline_engine.contract import Reason, RecurrentEdits
from leyline_replay.cache.anchors import Anchoring
from leyline_replay.engine import ReplayEngine
from leyline_replay.models.rotary_probe import UnsupportedModelError, read_model_facts

OPENING = 380
CUT = (150, 240)
STUB = (5, 6, 7, 8, 9, 10, 11)
EDITS: dict[str, tuple[Edit, ...]] = {
    "deletion": ((*CUT, ()),),
    "stub": ((*CUT, STUB),),
    "three": ((60, 80, (3,)), (*CUT, ()), (300, 310, (4, 5))),
}
FAMILIES = [*WINDOWED, *RECURRENT]

model = lru_cache(maxsize=2)(anchored_model)


def opened(subject: OracleModel, engine: ReplayEngine) -> AnchoredConversation:
    """A conversation of one turn, right within the bound."""
    conversation = AnchoredConversation(subject, engine)
    assert conversation.open(draw(random.Random(1), OPENING), (1, 2), 3) <= BOUND
    return conversation


def error_after_a_cut(name: str, engine: ReplayEngine) -> float:
    """Error of the first token after copied ones, which reads all of their state."""
    conversation = AnchoredConversation(model(name), engine)
    assert conversation.open(draw(random.Random(1), 384), (), 3) <= BOUND
    error, ran = conversation.edit(EDITS["deletion"], (), (1,), 3)
    assert (ran.receipt.tokens.prefix, ran.receipt.tokens.prefilled) == (150, 1)
    return error


@pytest.mark.parametrize("name", FAMILIES)
def test_an_edit_splices_within_the_bound(name: str) -> None:
    """Deletions, stubs, several cuts, and a cut after those, are the contract's."""
    subject = model(name)
    for edits in EDITS.values():
        conversation = opened(subject, anchored_engine(subject))
        for error, ran in (
            conversation.edit(edits, (7, 8, 9), (1, 2), 3),
            conversation.edit([(200, 220, ())], (7, 8, 9), (1, 2), 3),
        ):
            assert error <= BOUND
            assert ran.receipt.reason is Reason.SPLICED
            assert ran.receipt.tokens.spliced > 40
            assert ran.receipt.state == ("kept" if name in RECURRENT else "")


@pytest.mark.parametrize("name", sorted({*FAMILIES} - UNTURNED))
def test_keys_that_are_not_turned_show(name: str) -> None:
    """Control: copies whose keys stay as they were are far outside the bound."""
    engine = anchored_engine(model(name))
    tamper(engine, "no_rotation", model(name))
    assert error_after_a_cut(name, engine) >= CONTROL_FACTOR * BOUND


@pytest.mark.parametrize("how", ["no_state", "early", "other_convolution"])
@pytest.mark.parametrize("name", RECURRENT)
def test_a_wrong_state_shows(name: str, how: str) -> None:
    """Control: no state, the state of an earlier place, or its convolutions' inputs alone."""
    engine = anchored_engine(model(name))
    tamper_state(engine, how)
    assert error_after_a_cut(name, engine) >= CONTROL_FACTOR * BOUND


@pytest.mark.parametrize("name", WINDOWED)
def test_a_window_that_lacks_a_row_shows(name: str) -> None:
    """Control: attention that reads one row too few."""
    engine = anchored_engine(model(name))
    conversation = opened(model(name), engine)
    shorten_windows(engine)
    error, _ = conversation.edit(EDITS["deletion"], (7, 8, 9), (1, 2), 3)
    assert error >= CONTROL_FACTOR * BOUND


@pytest.mark.parametrize("name", FAMILIES)
def test_the_first_token_after_copies_is_right(name: str) -> None:
    """The same edit as the controls', untampered, is within the bound."""
    assert error_after_a_cut(name, anchored_engine(model(name))) <= BOUND


@pytest.mark.parametrize("name", ["qwen3-next", "gpt-oss"])
def test_random_sessions_stay_within_the_bound(name: str) -> None:
    """Deletions, stubs and forgets, turn after turn, on grids and pages, with too few states."""
    played = [play_session(model(name), seed) for seed in range(6)]
    assert sum(spliced for spliced, _ in played) > 500
    assert sum(forgot for _, forgot in played) > 1


@pytest.mark.nightly
@pytest.mark.parametrize("block", range(10))
@pytest.mark.parametrize("name", FAMILIES)
def test_many_random_sessions_stay_within_the_bound(name: str, block: int) -> None:
    """The same over many more, on every family."""
    for seed in range(100 + 20 * block, 120 + 20 * block):
        play_session(model(name), seed)


def test_nobody_gets_a_kept_state_unasked() -> None:
    """Without consent the edit is exact, and the receipt gives the reason."""
    subject = model("qwen3-next")
    conversation = opened(subject, anchored_engine(subject))
    conversation.conversation.recurrent = RecurrentEdits.EXACT
    error, ran = conversation.edit(EDITS["deletion"], (7, 8, 9), (1, 2), 3)
    assert error <= BOUND
    assert (ran.receipt.reason, ran.receipt.state) == (Reason.RECURRENT_STATE, "")
    assert ran.receipt.tokens.spliced == 0


def test_capabilities_state_what_is_kept() -> None:
    """Windows, states and their sizes are measured; recurrent models offer no reuse."""
    windowed = anchored_engine(model("gpt-oss")).capability
    recurrent = anchored_engine(model("nemotron-h"), anchoring=Anchoring(slots=9)).capability
    assert windowed.state is not None
    assert recurrent.state is not None
    assert (windowed.state.window, windowed.state.edits) == (23, "")
    assert "leyline.reuse@1.0" in windowed.actions
    assert recurrent.rotary is not None
    assert recurrent.rotary.rope_type == "none"
    facts = recurrent.state
    assert (facts.recurrent_layers, facts.edits, facts.slots) == (3, "kept", 9)
    assert facts.bytes_per_state == 3 * 4 * (4 * 16 * 16 + 128 * 4)
    assert not any("reuse" in action for action in recurrent.actions)


def test_a_model_that_only_decodes_from_a_state_is_refused() -> None:
    """Transformers' Jamba ignores the state in front of several tokens: no chunk could follow."""
    config = JambaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_layer_period=2,
        attn_layer_offset=1,
        num_experts=2,
        expert_layer_period=100,
        mamba_dt_rank=8,
        use_mamba_kernels=False,
    )
    with pytest.raises(UnsupportedModelError, match="ignores the state"):
        read_model_facts(randomized("jamba", config, seed=1).model)
