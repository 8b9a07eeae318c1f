"""Keys that are kept, against keys that are made each time."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from leyline_engine.contract import LineageRun
from leyline_engine.records.lineage import fold_keys
from leyline_engine.sglang.turn import TurnKeys

TOKENS = st.lists(st.integers(0, 99), max_size=6).map(lambda ids: array("q", ids))
MAPS = st.lists(
    st.tuples(st.integers(0, 9), st.sampled_from(["l1", "l2", "l3"])),
    max_size=3,
    unique_by=lambda run: run[0],
).map(lambda runs: tuple(LineageRun(*run) for run in sorted(runs)))


@given(st.lists(st.tuples(TOKENS, TOKENS, MAPS, st.integers(0, 12)), max_size=8))
def test_kept_keys_are_those_that_folding_gives(
    asked: list[tuple[array[int], array[int], tuple[LineageRun, ...], int]],
) -> None:
    """Whatever was asked before: other maps, another prompt, or another answer to it."""
    keys = TurnKeys("t")
    for prompt, answer, lineage, length in asked:
        tokens = (prompt + answer)[:length]
        assert keys.of(tokens, lineage, prompt) == fold_keys(tokens, lineage, "t")


def test_a_prompts_keys_are_made_once() -> None:
    """The second question gets the very array of the first."""
    keys, prompt = TurnKeys("t"), array("q", range(5))
    lineage = (LineageRun(2, "l"),)
    assert keys.of(prompt, lineage, prompt) is keys.of(prompt[:], lineage, prompt)
