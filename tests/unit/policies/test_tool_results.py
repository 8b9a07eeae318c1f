"""The shared behaviour of the policies on tool results."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tool_talks import USER, asks, call, result, steps

from leyline_policies import Message, pair_calls
from leyline_policies.builtin.tool_results import tool_names, with_edits
from leyline_policies.context import Context
from leyline_policies.conversation import RESULT_ROLES, nth_last

ids = st.sampled_from("abc")
tools = st.sampled_from(["bash", "read", "open"])
some_messages = st.lists(
    st.one_of(
        st.builds(
            lambda calls: asks(*[call(identity, tool) for identity, tool in calls.items()]),
            st.dictionaries(ids, tools, min_size=1),
        ),
        st.builds(result, ids, st.just("x")),
        st.just(USER),
        st.just({"role": "assistant", "content": "so"}),
    ),
    max_size=12,
)


@given(some_messages)
def test_tools_are_those_that_pairing_finds(messages: list[Message]) -> None:
    """A result's tool is that of the call it answers, in any order and reuse of ids."""
    paired = {index: each.name for each in pair_calls(messages) for index in each.results}
    found = tool_names(messages, Context())
    assert found == {
        index: paired.get(index, "")
        for index, message in enumerate(messages)
        if message["role"] in RESULT_ROLES
    }


def test_results_without_a_call_have_their_own_name() -> None:
    """A result whose call is gone, and an old function result, are known by their names."""
    messages: list[Message] = [
        result("gone", "x", name="read"),
        {"role": "function", "name": "bash", "content": "y"},
        result("gone", "z"),
    ]
    assert tool_names(messages, Context()) == {0: "read", 1: "bash", 2: ""}


def test_names_are_worked_out_once_for_a_list() -> None:
    """Policies that are given the same list share the names."""
    context, messages = Context(), steps(("bash", "x"))
    assert tool_names(messages, context) is tool_names(messages, context)


def test_nth_last_counts_from_the_end() -> None:
    """The n-th last message of a role is found, or None where there are fewer."""
    messages = [USER, *steps(("bash", "x")), USER]
    assert [nth_last(messages, "user", n) for n in (1, 2, 3)] == [3, 0, None]


def test_edits_that_change_nothing_keep_the_list() -> None:
    """Putting in the given objects hands on the list itself; else a new one."""
    messages = steps(("bash", "x"))
    assert with_edits(messages, {1: messages[1]}) is messages
    changed = with_edits(messages, {1: USER})
    assert changed == [messages[0], USER]
    assert messages[1]["content"] == "x"
