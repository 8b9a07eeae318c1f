"""The facts of a session that policies get, and the facts kept for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import pytest

from leyline_policies import Memo, Policy, load_pipeline
from leyline_proxy.edits.policy_facts import PolicyMemos, known_objects, token_counter
from leyline_proxy.edits.prepare import prepare
from leyline_proxy.model.messages import Message, fingerprint
from leyline_proxy.model.prepared import Prepared
from leyline_proxy.model.text_memory import Reader
from leyline_proxy.render import ChatRenderer


def _computed(memos: PolicyMemos, message: Message, policies: Sequence[Policy]) -> bool:
    """Return True if something had to be computed of the message."""
    computed: list[int] = []
    with memos.of(Reader("tenant", "session"), policies) as memo:
        memo.get(message, "key", lambda _: computed.append(1))
    return bool(computed)


def test_a_memo_is_the_sessions_for_its_policies() -> None:
    """A computed value is found on the next turn, but not by other policies."""
    memos, message = PolicyMemos(), {"role": "user", "content": "x"}
    one, other = load_pipeline("keep_all"), load_pipeline("keep_all")
    assert [_computed(memos, message, one) for _ in range(3)] == [True, False, False]
    assert _computed(memos, message, other)


def test_turns_at_the_same_time_share_no_memo() -> None:
    """The second gets one of its own."""
    memos, policies = PolicyMemos(), load_pipeline("keep_all")
    with (
        memos.of(Reader("t", "s"), policies) as first,
        memos.of(Reader("t", "s"), policies) as second,
    ):
        assert first is not second


def test_what_long_was_not_asked_for_is_gone() -> None:
    """Memory follows the conversation, not its history."""
    memos, policies = PolicyMemos(), load_pipeline("keep_all")
    old, new = {"role": "user", "content": "old"}, {"role": "user", "content": "new"}
    assert _computed(memos, old, policies)
    assert _computed(memos, new, policies)
    assert not any(_computed(memos, new, policies) for _ in range(64))
    assert _computed(memos, old, policies)


def test_messages_without_a_turn_before_stay_as_they_are() -> None:
    """A new session has no known objects."""
    messages = [{"role": "user", "content": "x"}]
    assert known_objects(messages, [fingerprint(messages[0])], None) == (messages[0],)
    assert known_objects(messages, [fingerprint(messages[0])], None)[0] is messages[0]


def test_tokens_count_text_and_calls() -> None:
    """Longer arguments, longer count; without a tokenizer a quarter of the characters."""
    count = token_counter(None)
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "x" * 400}}
    assert count({"role": "user", "content": "x" * 400}) == 103
    assert count({"role": "assistant", "content": None, "tool_calls": [call]}) == 103


def test_tokens_are_counted_anew_by_another_tokenizer() -> None:
    """A count by one tokenizer says nothing of the other's."""
    memos, policies = PolicyMemos(), load_pipeline("keep_all")
    one, other = cast("list[ChatRenderer]", [lambda: None, lambda: None])
    found: list[Memo] = []
    for renderer in (None, one, one, other):
        with memos.of(Reader("t", "s"), policies, renderer) as memo:
            found.append(memo)
    assert [each is found[1] for each in found] == [False, True, True, False]


def _prepared(messages: Sequence[Message]) -> Prepared:
    return prepare(messages, (), (), 0)


def test_messages_of_the_last_turn_are_the_same_objects() -> None:
    """They are the same where they were, and also where the client moved them."""
    texts = [{"role": "user", "content": text} for text in ("a", "b", "c")]
    last = _prepared(texts)
    for order in ((0, 1, 2), (0, 2, 1), (1, 2), (0,), (2, 0, 1)):
        sent = [*(dict(texts[place]) for place in order), {"role": "user", "content": "new"}]
        found = known_objects(sent, list(map(fingerprint, sent)), last)
        assert all(found[at] is texts[place] for at, place in enumerate(order))
        assert found[-1] is sent[-1]


@pytest.mark.parametrize(
    "other",
    [
        {"role": "user", "content": "a", "flag": True},
        {"role": "user", "content": "a", "flag": 1.0},
        {"role": "user", "content": [{"type": "text", "text": "a"}], "flag": 1},
        {"role": "user", "content": "a", "flag": 1, "cache_control": {"type": "ephemeral"}},
        {"role": "user", "content": "a", "flag": 1, "name": None},
    ],
)
def test_what_only_looks_alike_is_sent_as_it_came(other: Message) -> None:
    """Neither equal values of other types nor equal fingerprints make a message a known one."""
    last = _prepared([{"role": "user", "content": "a", "flag": 1}])
    (found,) = known_objects([other], [fingerprint(other)], last)
    assert found is other
