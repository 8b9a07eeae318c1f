"""The bench's control: splices of its own sessions are made, and their keys stay as they were."""

from __future__ import annotations

from functools import partial

import pytest
from scheduler_kit import Scheduler, sealed, source_of, text

from leyline_engine.contract import (
    Directive,
    EditPayload,
    Outcome,
    SourceRef,
    TurnRecord,
    apply_directives,
)
from leyline_engine.sglang.splicer import Splicer
from leyline_lab.three_arm.unrotated import PREFIX, copy

pytestmark = pytest.mark.usefixtures("server_args")


def edited(session: str, monkeypatch: pytest.MonkeyPatch) -> TurnRecord | None:
    """The record of an edit that the control's plugin sees."""
    original = Splicer._copy
    monkeypatch.setattr(Splicer, "_copy", lambda splicer, *args: copy(original, splicer, *args))
    scheduler = Scheduler()
    opened = partial(EditPayload, session=session, scope="t")
    told, _ = scheduler.serve(text(120, 1), opened(turn="t1"))
    cut = Directive(50, 60)
    sources = (SourceRef("t1", len(source_of(told)), sealed(told)),)
    payload = opened(turn="t2", sources=sources, directives=(cut,))
    return scheduler.serve([*apply_directives(source_of(told), [cut]), 9], payload)[1]


def test_sessions_of_others_are_rotated(monkeypatch: pytest.MonkeyPatch) -> None:
    """A splice under the plugin is right unless it is the control's."""
    record = edited("spliced.1", monkeypatch)
    assert record is not None
    assert record.receipt.outcome is Outcome.SPLICED


def test_its_own_sessions_are_spliced_and_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy is made, and a key is found at a position that isn't its own."""
    with pytest.raises(AssertionError, match="a key stands where it doesn't belong"):
        edited(f"{PREFIX}.1", monkeypatch)
