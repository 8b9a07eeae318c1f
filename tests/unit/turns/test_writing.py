"""Questions that policies put to a model beside the requests."""

from __future__ import annotations

import pytest

from leyline_proxy.model.session import Place, Session
from leyline_proxy.turns.questions import SessionMovedError
from leyline_proxy.turns.writing import _asking


@pytest.mark.parametrize("places", [{}, {"r1": Place("a", owed=True)}])
def test_a_policys_question_isnt_put_behind_a_forget(places: dict[str, Place]) -> None:
    """An engine that has been made to forget a session, or is to be, is given nothing of it."""
    session = Session("s", "red", "", (), (), 1, 0.0, places=places)
    with pytest.raises(SessionMovedError):
        _asking(session, "r1", told=True)
    assert _asking(session, "", told=False).unnamed == 1, (
        "an engine that retains nothing may be asked"
    )
