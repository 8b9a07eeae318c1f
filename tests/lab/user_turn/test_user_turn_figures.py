"""The user-turn bench's figures and conversations: counts, goals, agreement and arms left out."""

from __future__ import annotations

import pytest

from leyline_lab.replay.driver import StreamedAnswer
from leyline_lab.replay.results import RequestResult
from leyline_lab.user_turn.figures import (
    Agreement,
    ArmSamples,
    TurnArm,
    UserTurn,
    document,
    goals,
)
from leyline_lab.user_turn.run import agreement
from leyline_lab.user_turn.script import MAX_USER_TURNS, write_loops

PROMPT = list(range(1000))


def result(prefilled: int, *, cached: int = 100, ttft_ms: float = 10.0) -> RequestResult:
    """A request of which so much was prefilled, and the rest cached or spliced."""
    spliced = len(PROMPT) - cached - prefilled
    return RequestResult(0, 0, len(PROMPT), cached, spliced, prefilled, ttft_ms)


def turn(prefilled: int, session: int = 0, *, equal: bool = True) -> UserTurn:
    """A request with 20 new tokens at its end."""
    found = UserTurn.compared(
        session, result(prefilled), [*PROMPT[:500], -1, *PROMPT[500:980]], PROMPT
    )
    same = Agreement(4 if equal else 1, 4, 0.5, equal)
    return UserTurn(session, found.result, found.changed, found.unchanged, same)


def test_changed_and_unchanged_tokens_are_counted_from_the_prompts() -> None:
    """A stripped token is neither; new ones are changed; the sink's positions don't count."""
    found = turn(20)
    assert (found.changed, found.unchanged) == (20, 980 - 32)
    assert (found.beyond, found.reused) == (0, 1)
    worse = turn(50)
    assert worse.beyond == pytest.approx(0.03)
    assert worse.reused == pytest.approx(918 / 948)


@pytest.mark.parametrize(("prefilled", "beyond", "reused"), [(30, True, False), (31, False, False)])
def test_the_goals_are_those_of_the_worst_request(
    prefilled: int, beyond: bool, reused: bool
) -> None:
    """One bad request in many misses them, and each bound is exact."""
    met = goals([turn(20), turn(20), turn(prefilled)])
    assert (met["prefilled_beyond"]["met"], met["unchanged_reused"]["met"]) == (beyond, reused)
    fine = goals([turn(20), turn(29)])
    assert fine["prefilled_beyond"]["met"] and fine["unchanged_reused"]["met"]


def test_an_arm_that_is_missing_has_a_reason_and_no_figures() -> None:
    """An arm that can't run is told from one that reused nothing; times and shares add up."""
    turns = [turn(20), turn(20, 1), turn(24, 1, equal=False)]
    arms = {TurnArm.SPLICE: ArmSamples(turns, [result(40), result(60)])}
    found = document(arms, [result(20)], [result(900, cached=0)], {TurnArm.STRIP: "no server"})
    assert found["arms"]["strip"] == {"available": False, "reason": "no server"}
    assert "radix" not in found["arms"]
    splice = found["arms"]["splice"]
    assert splice["available"] and splice["loop_prefilled_tokens"] == 50
    assert splice["agreement"] == {
        "sessions": 0.5,
        "answers": pytest.approx(2 / 3, abs=1e-6),
        "tokens": 0.75,
        "logit_delta": 0.5,
    }
    assert splice["ttft_ms"]["p50"] == 10
    assert found["arms"]["full"]["prefilled_tokens"] == 900
    assert found["floor"]["requests"] == 1


@pytest.mark.parametrize(
    ("chosen", "equal_tokens", "equal"),
    [
        (("a", "b"), 2, True),
        (("a", "c"), 1, False),
        (("a",), 1, False),
        (("a", "b", "c"), 2, False),
    ],
)
def test_answers_agree_up_to_their_first_other_token(
    chosen: tuple[str, ...], equal_tokens: int, equal: bool
) -> None:
    """A shorter and a longer answer differ, too."""
    reference = answer(("a", "b"))
    found = agreement(answer(chosen), reference)
    assert (found.equal_tokens, found.tokens, found.equal) == (equal_tokens, 2, equal)


def answer(chosen: tuple[str, ...]) -> StreamedAnswer:
    """An answer of these tokens."""
    message = {"role": "assistant", "content": "".join(chosen)}
    return StreamedAnswer(message, result(20), len(chosen), chosen)


@pytest.mark.parametrize(("calls", "user_turns"), [(1, 1), (20, 2), (100, MAX_USER_TURNS)])
def test_each_loop_asks_for_what_one_of_its_last_outputs_shows(calls: int, user_turns: int) -> None:
    """The setting is in one output only, and the agent is never asked to choose it."""
    loops = write_loops("seed", calls, user_turns)
    assert len(loops) == user_turns and all(len(loop.outputs) == calls for loop in loops)
    texts = [text for loop in loops for text in (loop.task, *loop.outputs)]
    for loop in loops:
        name = loop.question.split("`")[1]
        assert sum(f"\n{name}" in f"\n{text}" for text in texts) == 1
        assert any(f"\n{name}" in f"\n{output}" for output in loop.outputs[-10:])
        assert not any(f"Choose `{name}`" in text for text in texts)
        assert loop.outputs[-1].count("Choose") == 0 and loop.task.startswith("Choose")
    assert write_loops("other", calls, user_turns) != loops


def test_more_user_turns_than_settings_are_refused() -> None:
    """The message gives the bound."""
    with pytest.raises(ValueError, match=str(MAX_USER_TURNS)):
        write_loops("seed", 1, MAX_USER_TURNS + 1)
