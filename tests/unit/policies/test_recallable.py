"""Stubs in place of evicted texts: where they stand, and what isn't worth one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.builtin_specs import FORGETTING, SPECS, recallable
from support.parts import check_parts, parts_in

from leyline_policies import Context, Memo, Message, SpecError, drop, edit, load_pipeline, text_of
from leyline_policies.compose import pipeline, protect
from leyline_policies.context import apply
from leyline_policies.marks import mark_of
from leyline_policies.policy import function_policy
from leyline_policies.recall import evicted_by, stubs_in
from leyline_policies.recallable import recallable as wrapped
from leyline_policies.runs import MAX_PARTS, PART_TOKENS
from leyline_policies.testing import check_policy

LONG = "line of output\n" * 40


def call(number: int, name: str = "bash", text: str = "") -> Message:
    """An assistant message with one call."""
    body = {"name": name, "arguments": f'{{"command": "run {number}"}}'}
    asked = {"id": f"c{number}", "type": "function", "function": body}
    return {"role": "assistant", "content": text, "tool_calls": [asked]}


def result(number: int, text: str | None = None) -> Message:
    """The answer to `call`."""
    text = f"{number} {LONG}" if text is None else text
    return {"role": "tool", "tool_call_id": f"c{number}", "content": text}


def talk(steps: int, *, users: int = 1) -> list[Message]:
    """Instructions, the user's messages, and calls with long results."""
    asked: list[Message] = [{"role": "user", "content": f"task {n}"} for n in range(users)]
    rounds = [message for n in range(steps) for message in (call(n), result(n))]
    return [{"role": "system", "content": "be brief"}, *asked, *rounds]


def sent(spec: str, messages: list[Message], **facts: Any) -> list[Message]:
    """The messages that a recallable policy sends; its parts are whole."""
    (policy,) = load_pipeline(recallable(spec))
    after = apply(policy, messages, 0, Context(**facts))
    check_parts(messages, after, policy)
    return after


def stub_places(messages: list[Message]) -> list[int]:
    """The places of stubs."""
    return [at for at, message in enumerate(messages) if stubs_in(text_of(message))]


def only(*places: int) -> Any:
    """A policy that removes messages, and says nothing of them."""

    @function_policy(name="only")
    def remove(messages: list[Message], turn_idx: int) -> list[Message]:
        return [message for at, message in enumerate(messages) if at not in places]

    return remove


def test_a_placeholder_without_a_cause_gives_way_to_the_stub() -> None:
    """The stub says what it said, and more."""
    after = sent("clear_tool_uses:trigger_tokens=20,keep=1", talk(3))
    (part,) = evicted_by(after[3])
    assert after[3]["content"] == part.stub
    assert (part.text, part.tool, part.role) == (result(0)["content"], "bash", "tool")
    assert part.tokens == Context().tokens(result(0))
    mark = mark_of(after[3])
    assert mark is not None and mark.stub


def test_a_placeholder_that_says_why_stays() -> None:
    """It has a cause, and the stub follows on a line of its own."""
    again = [call(0), result(0), call(0), result(0)]
    messages: list[Message] = [{"role": "user", "content": "go"}, *again]
    after = sent("deduplicate_calls:exclude_tools=[]", messages)
    first, second = text_of(after[2]).split("\n")
    assert first == "[same call made again later; result removed]"
    assert second == evicted_by(after[2])[0].stub


def test_a_shortened_text_keeps_its_head_and_tail() -> None:
    """The stub comes after them, also in a list of parts."""
    messages = talk(2)
    messages[3] = {**messages[3], "content": [{"type": "text", "text": LONG}]}
    after = sent("truncate_older_than:n=0,max_chars=100", messages)
    (plain,) = load_pipeline("truncate_older_than:n=0,max_chars=100")
    short = apply(plain, messages, 0)
    for at, new in ((3, f"{text_of(short[3])}\n"), (5, f"{text_of(short[5])}\n")):
        assert text_of(after[at]) == new + evicted_by(after[at])[0].stub
    assert len(after[3]["content"]) == 2


def test_what_would_not_get_shorter_stays() -> None:
    """A short result keeps its text: a stub would be longer."""
    messages = talk(3)
    messages[3] = result(0, "ok, all of it done")
    after = sent("clear_tool_uses:trigger_tokens=20,keep=1", messages)
    assert after[3] is messages[3]
    assert stub_places(after) == [5]


def test_nothing_worth_a_stub_returns_the_list_itself() -> None:
    """Then nothing of the cache is lost either."""
    messages: list[Message] = [{"role": "user", "content": "go"}, call(0), result(0, "ok, done")]
    assert sent("clear_tool_uses:trigger_tokens=1,keep=0", messages) is messages
    short: list[Message] = [*messages[:1], {"role": "assistant", "content": "yes"}, *messages[1:]]
    assert apply(wrapped(only(1)), short, 0) is short


@pytest.mark.parametrize(
    ("removed", "users", "bearer"),
    [
        ((4, 5), 1, 3),  # the result before
        ((2, 3), 1, 3),  # the user's only message isn't touched: the result after
        ((3, 4), 2, 1),  # a message of the user's before, if it isn't the last
        ((2, 3, 4, 5, 6, 7), 1, 1),  # no other is left
    ],
)
def test_stubs_of_removed_messages_go_to_their_neighbour(
    removed: tuple[int, ...], users: int, bearer: int
) -> None:
    """They go before the gap if a message there may bear them, and never to the model's words."""
    messages = talk(3, users=users)
    if users == 2:
        messages.insert(5, messages.pop(2))
        removed = (2, 3)
    policy = wrapped(only(*removed))
    after = apply(policy, messages, 0)
    check_parts(messages, after, policy)
    assert stub_places(after) == [bearer]
    (part,) = evicted_by(after[bearer])
    assert (part.messages, part.role) == (len(removed), "")
    assert '[calls bash]\n{"command": "run ' in part.text
    assert len(apply(only(*removed), messages, 0)) == len(after)


def test_a_message_that_the_policy_put_in_bears_the_stubs() -> None:
    """It stands for what is gone; its neighbours stay the same objects."""

    @function_policy(name="sum")
    def replace(messages: list[Message], turn_idx: int) -> list[Message]:
        return [*messages[:4], {"role": "user", "content": "They looked."}, *messages[6:]]

    messages = talk(3)
    after = apply(wrapped(replace), messages, 0)
    assert text_of(after[4]).startswith("They looked.\n[evicted: 2 messages, ")
    assert [after[at] is messages[place] for at, place in ((3, 3), (5, 6), (6, 7))] == [True] * 3


def test_protected_and_pinned_messages_bear_no_stub() -> None:
    """Nobody edits them; the next one bears it. If none is left, the policy's edit isn't made."""
    messages = talk(3)
    guarded = protect(only(4, 5), keep_last=2)
    assert stub_places(apply(wrapped(guarded), messages, 0)) == [3]
    messages[3] = {**messages[3], "leyline": {"pin": True}}
    assert stub_places(apply(wrapped(only(4, 5)), messages, 0)) == [5]
    assert stub_places(apply(wrapped(guarded), messages, 0)) == [1]
    messages[1] = {**messages[1], "leyline": {"pin": True}}
    assert apply(wrapped(guarded), messages, 0) is messages


def test_the_models_own_words_bear_no_stub() -> None:
    """A shortened assistant message stays as the policy left it; a result shows the stub."""
    messages = talk(2)
    messages[4] = call(1, text=f"I see <diff>{LONG}</diff> so")
    after = sent("remove_regex:remove=['<diff>.*?</diff>']", messages)
    assert text_of(after[4]) == "I see  so"
    assert stub_places(after) == [3]
    (part,) = evicted_by(after[3])
    assert (part.role, part.text) == ("assistant", messages[4]["content"])


def test_a_call_removed_from_a_message_is_in_the_text() -> None:
    """The result's text begins with the call that it answered."""
    first = call(0)
    both = {**first, "tool_calls": [*first["tool_calls"], *call(1)["tool_calls"]]}
    failed = {**result(1, f"Error: no\n{LONG}")}
    messages: list[Message] = [
        *({"role": "user", "content": "go"}, both, result(0), failed),
        *(call(2), result(2)),
    ]
    after = sent("drop_failed_calls", messages)
    assert len(after[1]["tool_calls"]) == 1
    (part,) = parts_in(after).values()
    assert part.text.startswith('[calls bash]\n{"command": "run 1"}\n[bash output]\nError: no')


@pytest.mark.parametrize("name", sorted(FORGETTING))
def test_what_is_forgotten_is_never_recallable(name: str) -> None:
    """The error says what to leave out."""
    with pytest.raises(SpecError, match=f"^{name}: recallable=true: .* leave out recallable"):
        load_pipeline(recallable(SPECS[name][0]))


def test_a_single_forget_gets_no_stub() -> None:
    """Neither an edit nor a removal that is marked as forget has an address."""

    @function_policy(name="tidy", forgets=True)
    def tidy(messages: list[Message], turn_idx: int) -> list[Message]:
        new = list(messages)
        new[3] = edit(new[3], stub="[gone]", mode="forget")
        new[4], new[5] = drop(new[4], mode="forget"), drop(new[5], mode="forget")
        new[7] = edit(new[7], stub="[old]")
        return new

    messages = talk(3)
    after = apply(wrapped(tidy), messages, 0)
    assert stub_places(after) == [5]
    assert [part.text for part in parts_in(after).values()] == [messages[7]["content"]]


def test_instructions_pictures_and_thinking_get_no_stub() -> None:
    """Only text of the conversation has addresses."""
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    parts = [{"type": "text", "text": LONG}, picture, {"type": "text", "text": "so"}]
    messages: list[Message] = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "", "reasoning_content": LONG},
        {"role": "user", "content": "next"},
        {"role": "assistant", "content": "", "reasoning_content": LONG},
        {"role": "user", "content": "next"},
    ]
    for spec in ("drop_images", "clear_thinking:keep=0"):
        (plain,) = load_pipeline(spec)
        assert sent(spec, messages) == apply(plain, messages, 0) != messages


def test_a_picture_goes_for_a_stub_at_any_length() -> None:
    """The picture is what is saved: its text is counted, its size isn't."""
    content = [{"type": "text", "text": "short"}, {"type": "image_url", "image_url": {"url": "x"}}]
    messages = talk(2)
    messages[3] = {**messages[3], "content": content}
    (policy,) = load_pipeline(recallable("clear_tool_uses:trigger_tokens=1,keep=1"))
    (part,) = evicted_by(apply(policy, messages, 0, Context())[3])
    assert part.text == "short"


def test_gates_count_the_stubs() -> None:
    """A policy waits until it reclaims enough with them."""
    messages = talk(2)
    plain = "clear_tool_uses:trigger_tokens=20,keep=1"
    (policy,) = load_pipeline(plain)
    saved = Context().total(messages) - Context().total(apply(policy, messages, 0, Context()))
    (policy,) = load_pipeline(f"{plain},at_least={saved}")
    assert apply(policy, messages, 0, Context()) is not messages
    assert sent(f"{plain},at_least={saved}", messages) is messages
    assert sent(f"{plain},at_least={saved - 25}", messages) is not messages


def test_parts_of_parts_are_there() -> None:
    """A later policy's part shows an earlier one's stub, and its text is there as well."""
    clamp, clear = load_pipeline(
        f"{recallable('truncate_older_than:n=0,max_chars=300')} | "
        f"{recallable('clear_tool_uses:trigger_tokens=20,keep=1')}"
    )
    messages = talk(3)
    both = apply(pipeline(clamp, clear), messages, 0, Context())
    outer, inner = evicted_by(both[3])
    assert stubs_in(outer.text)[0].address == inner.address
    assert inner.text == messages[3]["content"]
    window = load_pipeline(recallable("sliding_window:max_messages=5,keep_messages=2"))[0]
    found = parts_in(apply(pipeline(clamp, window), messages, 0, Context()))
    assert {messages[3]["content"], messages[5]["content"]} <= {p.text for p in found.values()}


def test_copies_by_hand_have_parts_too() -> None:
    """A plug-in that doesn't mark its edits leaves stubs, and keeps the rules with them."""

    def short(messages: list[Message], turn_idx: int) -> list[Message]:
        return [
            {**m, "content": text_of(m)[:20]} if len(text_of(m)) > 20 and m["role"] == "tool" else m
            for m in messages
        ]

    policy = wrapped(function_policy(name="short")(short))
    messages = talk(2)
    after = apply(policy, messages, 0)
    check_parts(messages, after, policy)
    assert stub_places(after) == [3, 5]
    assert check_policy(policy).reclaimed_tokens > 0


@settings(max_examples=settings.default.max_examples // 4)
@given(st.lists(st.integers(1, 2 * PART_TOKENS), min_size=2, max_size=40))
def test_a_growing_run_keeps_its_addresses(sizes: list[int]) -> None:
    """Parts that are complete stay from turn to turn, pairs are in one part, and parts are few."""
    messages: list[Message] = [{"role": "user", "content": "a"}, result(99, "kept")]
    for number, size in enumerate(sizes):
        messages += [call(number), result(number, f"{number} {'x' * 4 * size}")]
    messages += [{"role": "assistant", "content": "so"}, {"role": "user", "content": "b"}]
    memo, before = Memo(), list[str]()
    for end in range(2, len(messages), 4):
        memo.next_turn()
        policy = wrapped(only(*range(2, end)))
        after = apply(policy, messages, 0, Context(memo=memo))
        fresh = apply(policy, messages, 0, Context())
        assert after == fresh
        now = [part.address for part in evicted_by(after[1])]
        assert len(now) <= MAX_PARTS
        done = before[:-1] if len(before) <= len(now) else []  # fewer: each is twice as long
        assert now[: len(done)] == done
        before = now
        for part in evicted_by(after[1]):
            assert part.text.startswith("[assistant]\n[calls bash]")


def test_the_last_turns_objects_are_sent_again() -> None:
    """A turn edits only what is new: all else is the very same message."""
    (policy,) = load_pipeline(recallable("sliding_window:max_messages=6,keep_messages=4"))
    clear = load_pipeline(recallable("clear_tool_uses:trigger_tokens=20,keep=1"))[0]
    for tried in (policy, clear):
        memo, messages = Memo(), talk(6)
        first = apply(tried, messages, 0, Context(memo=memo))
        memo.next_turn()
        again = apply(tried, messages, 1, Context(memo=memo))
        assert parts_in(first) and all(map(lambda old, new: old is new, first, again))


def test_a_run_that_changed_inside_has_other_parts() -> None:
    """Nothing of before is taken for it, though it begins with the same message."""
    memo, messages = Memo(), talk(5)
    policy = wrapped(only(4, 5, 6, 7, 8, 9))
    apply(policy, messages, 0, Context(memo=memo))
    messages[7] = result(2, f"changed {LONG}")
    after = apply(policy, messages, 1, Context(memo=memo))
    check_parts(messages, after, policy)
    assert after == apply(policy, messages, 1, Context())


def test_a_policy_that_turns_to_forgetting_leaves_no_stub() -> None:
    """Its mode counts as it is on the turn."""
    modes = ["amortize"]

    class Fickle:
        name = "fickle"
        mode = property(lambda self: modes[-1])

        def transform(self, messages: list[Message], turn_idx: int) -> list[Message]:
            return only(4, 5).transform(messages, turn_idx)  # type: ignore[no-any-return]

    policy = wrapped(Fickle())  # type: ignore[arg-type]
    assert stub_places(apply(policy, talk(3), 0)) == [3]
    modes.append("forget")
    assert stub_places(apply(policy, talk(3), 0)) == []
