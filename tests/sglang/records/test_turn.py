"""A turn's phases and what its plan came to."""

from __future__ import annotations

from array import array
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyline_engine.admit.plan import plan_turn
from leyline_engine.contract import CopySegment, EditPayload, LineageRun
from leyline_engine.records.lineage import fold_keys
from leyline_engine.sglang.splicer import as_admitted
from leyline_engine.sglang.turn import TRANSITIONS, Phase, PhaseError, Turn

PAYLOAD = EditPayload(session="s", scope="tenant", turn="t1")


def turn() -> Turn:
    """A new turn of a request without a namespace."""
    return Turn(SimpleNamespace(extra_key=None, cache_salt=None), "m", PAYLOAD)


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("following", Phase)
def test_only_the_tables_transitions_are_taken(phase: Phase, following: Phase) -> None:
    """A phase that doesn't follow the current one is refused, and the current one stays."""
    subject = turn()
    subject.phase = phase
    if following in TRANSITIONS[phase]:
        subject.move(following)
        assert subject.phase is following
    else:
        with pytest.raises(PhaseError):
            subject.move(following)
        assert subject.phase is phase


def test_every_phase_can_be_reached_and_left_but_the_last() -> None:
    """The table has no dead end but the end."""
    reached = {Phase.NEW} | {following for row in TRANSITIONS.values() for following in row}
    assert reached == set(Phase)
    assert [phase for phase in Phase if not TRANSITIONS[phase]] == [Phase.ENDED]


def test_keys_fold_the_lineage_in() -> None:
    """A turn without a lineage keys by token ids alone; with one, as the shared code does."""
    subject, tokens = turn(), array("q", [1, 2, 3])
    assert subject.keys(tokens) == tokens
    subject.req.origin_input_ids = tokens
    subject.lineage = (LineageRun(1, "l"),)
    assert subject.keys(tokens) == fold_keys(tokens, subject.lineage, "tenant")


@given(st.data())
def test_tokens_of_an_admitted_plan_add_up(data: st.DataObject) -> None:
    """Prefix, spliced and prefilled make up the prompt, whatever was evicted before admission."""
    length = data.draw(st.integers(8, 60))
    prefix = data.draw(st.integers(0, length - 2))
    cuts = sorted(data.draw(st.sets(st.integers(0, length), max_size=6)))
    copies = [
        CopySegment(0, start + 5, end + 5, start)
        for start, end in zip(cuts[::2], cuts[1::2], strict=False)
    ]
    plan = plan_turn(length, prefix, copies, [length + 5], sink=0)
    whole = max((copy.dest_end for copy in plan.copies), default=prefix)
    reused = data.draw(st.integers(0, whole))
    executed, counts = as_admitted(plan, reused)
    assert counts.prompt == counts.prefix + counts.spliced + counts.prefilled == length
    assert min(counts.prefix, counts.spliced, counts.prefilled) >= 0
    assert executed.spliced == counts.spliced <= plan.spliced
    assert executed.evicted - plan.evicted == plan.spliced - counts.spliced
    if reused == whole:
        assert (counts.prefix, counts.spliced) == (prefix, plan.spliced)
        assert counts.prefilled == plan.prefilled
