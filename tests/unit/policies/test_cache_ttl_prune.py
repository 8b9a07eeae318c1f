"""cache_ttl_prune, case by case."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tool_talks import SYSTEM, USER, contents, sent, steps, talk

from leyline_policies import Message, text_of
from leyline_policies.builtin.cache_ttl_prune import CacheTtlPrune
from leyline_policies.context import Context, apply, run

GONE = "[Old tool result content cleared]"
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}


def _after(idle_s: float, state: dict[str, Any] | None = None, window: int = 1000) -> Context:
    """A turn after a pause, on which a token is a character."""
    return Context(
        idle_s=idle_s,
        window=window,
        state={} if state is None else state,
        count=lambda message: len(text_of(message)),
    )


def _policy(**settings: Any) -> CacheTtlPrune:
    """Small limits: trim over 100 characters to 20 and 10, clear from 50 on."""
    small = {"soft_max_chars": 100, "head_chars": 20, "tail_chars": 10, "min_prunable_chars": 50}
    return CacheTtlPrune(**{**small, **settings})


def _texts(*sizes: int) -> list[Message]:
    """Results of these sizes; the newest three steps are protected."""
    return talk(*[("bash", chr(97 + n) * size) for n, size in enumerate(sizes)])


def test_golden_trim() -> None:
    """A long result becomes head, tail and a note; the texts are OpenClaw's."""
    text = "h" * 1500 + "x" * 2000 + "t" * 1500
    messages = talk(*[("bash", text)] * 4)
    after = contents(sent(CacheTtlPrune(), messages, _after(300, window=60_000)))
    assert after[0] == (
        f"{'h' * 1500}\n...\n{'t' * 1500}\n\n"
        "[Tool result trimmed: kept first 1500 chars and last 1500 chars of 5000 chars.]"
    )
    assert after[1:] == [text] * 3


def test_only_a_pause_prunes() -> None:
    """Before the cache has expired nothing is pruned, at its expiry it is."""
    messages = _texts(900, 900, 1, 1, 1)
    assert run(_policy(), messages, 0, _after(299)) is messages
    assert sent(_policy(), messages, _after(300)) != messages
    assert sent(_policy(ttl="1h"), messages, _after(3599)) == messages
    assert sent(_policy(ttl="90"), messages, _after(90)) != messages


def test_half_empty_window_is_left_alone() -> None:
    """Below the soft ratio of the window nothing is pruned."""
    messages = _texts(200, 1, 1, 1)
    total = _after(300).total(messages)
    assert sent(_policy(), messages, _after(300, window=round(total / 0.29))) == messages
    assert sent(_policy(), messages, _after(300, window=round(total / 0.31))) != messages


def test_unknown_window_prunes_nothing() -> None:
    """Without a window there is no ratio, unless window_tokens gives one."""
    messages = _texts(900, 900, 1, 1, 1)
    unknown = Context(idle_s=300, count=lambda message: len(text_of(message)))
    assert sent(_policy(), messages, unknown) == messages
    assert sent(_policy(window_tokens=1000), messages, unknown) != messages


def test_oldest_are_cleared_until_there_is_room() -> None:
    """If trimming isn't enough, the oldest results go, no more than needed."""
    messages = _texts(90, 90, 90, 90, 90, 90, 1, 1, 1)
    after = contents(sent(_policy(), messages, _after(300)))
    assert [text == GONE for text in after] == [True, True] + [False] * 7
    kept = contents(sent(_policy(hard_clear=False), messages, _after(300)))
    assert kept == contents(messages)
    little = contents(sent(_policy(min_prunable_chars=541), messages, _after(300)))
    assert little == contents(messages)
    enough = contents(sent(_policy(min_prunable_chars=540), messages, _after(300)))
    assert enough == after


def test_newest_and_first_messages_stay() -> None:
    """Results after the last assistants, and those before the first user message, stay."""
    first = [SYSTEM, *steps(("read", "s" * 900), start=50), USER]
    messages = [*first, *steps(*[("bash", "x" * 900)] * 4)]
    after = contents(sent(_policy(), messages, _after(300)))
    assert [text in (GONE,) or len(text) < 200 for text in after] == [False, True] + [False] * 3
    all_but_first = contents(sent(_policy(keep_last_assistants=0), messages, _after(300)))
    assert [text == GONE for text in all_but_first] == [False] + [True] * 4
    few = _texts(900, 900)
    assert sent(_policy(), few, _after(300)) == few


def test_what_was_pruned_stays_pruned() -> None:
    """On later turns without a pause the same results are pruned, and no others."""
    state: dict[str, Any] = {}
    messages = _texts(*[300] * 8)
    pruned = apply(_policy(), messages, 0, _after(301, state))
    assert pruned[:8] != messages[:8]
    longer = [*messages, *steps(*[("bash", "z" * 900)] * 5, start=20)]
    later = apply(_policy(), longer, 1, _after(2, json.loads(json.dumps(state))))
    assert later == [*pruned, *longer[len(messages) :]]
    assert apply(_policy(), longer, 2, _after(301, state)) != later


@given(
    st.lists(st.tuples(st.integers(0, 260), st.booleans()), min_size=1, max_size=14),
    st.integers(200, 1500),
)
def test_pruning_only_grows(turns: list[tuple[int, bool]], window: int) -> None:
    """Over any session, a pruned result never comes back, and without a pause nothing changes."""
    state: dict[str, Any] = {}
    messages: list[Message] = [SYSTEM, USER]
    before: list[Message] = []
    for number, (size, pause) in enumerate(turns):
        messages = [*messages, *steps(("bash", "x" * size), start=number)]
        after = sent(_policy(), messages, _after(400 if pause else 1, state, window))
        shared = len(before)
        if not pause:
            assert after[:shared] == before
        for old, new, given_ in zip(before, after, messages, strict=False):
            if old != given_:
                assert new in (old, {**old, "content": GONE})
        before = after


def test_another_conversation_is_not_pruned_by_the_old_bounds() -> None:
    """After the client has rewritten its history, or on a shorter branch, the bounds don't hold."""
    state: dict[str, Any] = {}
    messages = _texts(*[300] * 8)
    pruned = apply(_policy(), messages, 0, _after(301, state))
    rewritten = [SYSTEM, USER, *_texts(*[299] * 9)[2:]]
    assert apply(_policy(), rewritten, 1, _after(1, state)) == rewritten
    assert apply(_policy(), messages[:4], 1, _after(1, state)) == messages[:4]
    assert apply(_policy(), messages, 1, _after(1, state)) == pruned


def test_state_is_small_and_holds_no_text() -> None:
    """The state is four numbers."""
    state: dict[str, Any] = {}
    apply(_policy(), _texts(*[300] * 8), 0, _after(301, state))
    assert set(state) == {"trimmed", "cleared", "last", "print"}
    assert all(isinstance(value, int) for value in state.values())


def test_images_go_with_the_trim() -> None:
    """A part list becomes its texts, with a marker for each image."""
    parts = [IMAGE, {"type": "text", "text": "seen " + "x" * 60}]
    odd = [IMAGE, {"type": "hologram"}]
    messages = talk(("shot", parts), ("odd", odd), *[("bash", "y" * 300)] * 3)
    after = contents(sent(_policy(hard_ratio=9), messages, _after(300)))
    assert after[0] == f"[image removed during context pruning]\nseen {'x' * 60}"
    assert after[1] == odd


def test_tools_are_names_or_patterns() -> None:
    """tools and exclude_tools take patterns, whatever the case; what is excluded stays."""
    names = ("Browser_Open", "browser_shot", "bash", "x", "y", "z")
    messages = talk(*[(name, "t" * 300) for name in names])
    policy = _policy(tools=("browser_*", "BASH"), exclude_tools=("*_shot",), hard_ratio=9)
    after = contents(sent(policy, messages, _after(300)))
    assert [len(text) < 300 for text in after] == [True, False, True, False, False, False]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"ttl": "soon"}, "ttl: 'soon'"),
        ({"keep_last_assistants": -1}, "keep_last_assistants=-1"),
        ({"soft_ratio": -0.1}, "soft_ratio=-0.1"),
        ({"head_chars": 4000}, "head_chars=4000 and tail_chars=1500"),
        ({"window_tokens": 0}, "window_tokens=0"),
        ({"tools": ()}, "tools"),
    ],
)
def test_unusable_settings_are_named(settings: dict[str, Any], said: str) -> None:
    """A setting that can't work is refused, by name."""
    with pytest.raises(ValueError, match=said):
        CacheTtlPrune(**settings)
