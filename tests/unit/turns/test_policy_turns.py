"""Turns that ask a policy's question after the list that another turn has sent."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from leyline_proxy.model.session import Place, Session
from leyline_proxy.turns.questions import SessionMovedError, check_place, is_same
from leyline_proxy.turns.retaining import MAX_COMPLETIONS, SessionGoneError, known, with_completion

SESSION = Session("s", "red", "", (), (), 1, 0.0, created=2.0)


@pytest.mark.parametrize(
    ("changes", "same"),
    [({}, True), ({"demands": 1}, False), ({"created": 3.0}, False), ({"next_index": 5}, True)],
)
def test_an_answer_fits_the_session_that_was_asked_about(
    changes: dict[str, Any], same: bool
) -> None:
    """Not one that something was to be forgotten of since, nor another one of the same name."""
    assert is_same(replace(SESSION, **changes), SESSION) is same


def test_messages_go_only_where_they_still_may_be() -> None:
    """Not after a demand since, and not to an engine that has forgotten the session or is to."""
    here = replace(SESSION, places={"r": Place("a")})
    check_place(here, "r", settled=here)
    owed = replace(here, places={"r": Place("a", owed=True)})
    for now in (replace(here, demands=1), SESSION, owed):
        with pytest.raises(SessionMovedError):
            check_place(now, "r", settled=here)


def test_a_session_that_has_expired_gets_no_answer() -> None:
    """It doesn't come back for it."""
    assert known(SESSION) is SESSION
    with pytest.raises(SessionGoneError):
        known(None)


def test_a_session_has_few_texts() -> None:
    """The latest stay."""
    session = SESSION
    for number in range(MAX_COMPLETIONS + 2):
        session = with_completion(session, f"0.p:{number}", "text")
    session = with_completion(session, "0.p:5", "newer")
    assert len(session.completions) == MAX_COMPLETIONS
    assert session.completions["0.p:5"] == "newer" and "0.p:1" not in session.completions
