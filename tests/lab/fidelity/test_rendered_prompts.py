"""Prompts as tokens, the directives between two of them, and the tools that answers call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from leyline_engine.contract import apply_directives
from leyline_lab.fidelity.experiment import SessionStep, spread
from leyline_lab.fidelity.judges import called_tool
from leyline_lab.fidelity.rendering import Rendered, edits_between
from leyline_lab.fidelity.replay_subject import render_chat
from leyline_replay.models.trained import DEFAULT_MODEL_NAME, trained_model_dir
from leyline_replay.text.chat import PromptEncoder

_TEXTS = st.text(alphabet="ab =\n☃<", max_size=12)
_ROLES = st.sampled_from(("user", "tool", "assistant"))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """The shipped models' tokenizer."""
    return AutoTokenizer.from_pretrained(trained_model_dir(DEFAULT_MODEL_NAME))


def rendered(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> Rendered:
    """A conversation in the shipped models' template."""
    return render_chat(PromptEncoder(tokenizer), tokenizer, messages, ())


@example([("user", "<", ""), ("user", "<", "<<"), ("user", "<", "<<")])
@given(st.lists(st.tuples(_ROLES, _TEXTS, _TEXTS), min_size=1, max_size=6))
def test_directives_make_the_edited_prompt(
    tokenizer: Any, drawn: list[tuple[str, str, str]]
) -> None:
    """Whatever the texts are, applying the directives gives the edited prompt's own tokens."""
    before = rendered(tokenizer, [{"role": role, "content": old} for role, old, _ in drawn])
    after = rendered(tokenizer, [{"role": role, "content": new} for role, _, new in drawn])
    edits = edits_between(before, after)
    assert apply_directives(before.tokens, edits) == after.tokens.tolist()
    assert (not edits) == (before.tokens == after.tokens)


def test_each_cut_text_is_an_edit_of_its_own(tokenizer: Any) -> None:
    """Two cut outputs are two directives that leave what begins and ends alike."""
    long, cut = "begin " + "x y z " * 30 + "end", "begin [cut] end"
    messages = [{"role": role, "content": long} for role in ("tool", "assistant", "tool", "user")]
    edited = [{**each, "content": cut} if each["role"] == "tool" else each for each in messages]
    before = rendered(tokenizer, messages)
    edits = edits_between(before, rendered(tokenizer, edited))
    assert len(edits) == 2
    assert all(
        start < edit.start < edit.end < end
        for edit, span in zip(edits, (before.contents[0], before.contents[2]), strict=True)
        if span
        for start, end in [span]
    )


def test_contents_lie_where_their_text_is(tokenizer: Any) -> None:
    """The tokens of a content's place decode to it."""
    texts = ["hello", "hello", "one\ntwo", ""]
    prompt = rendered(tokenizer, [{"role": "user", "content": text} for text in texts])
    found = [span and tokenizer.decode(prompt.tokens[slice(*span)]) for span in prompt.contents]
    assert found == ["hello", "hello", "one\ntwo", None]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ('<tool_call>\n{"name": "run", "arguments": {}}\n</tool_call>', "run"),
        ('Well. <tool_call>{"name": "run", "arguments": {"a"', "run"),
        ("<function=read_file><parameter=path>", "read_file"),
        ("<｜tool▁call▁begin｜>function<｜tool▁sep｜>bash\n```json", "bash"),
        ("<tool_call>bash\n<arg_key>command</arg_key>", "bash"),
        ("<|tool_call_begin|>functions.bash:0<|tool_call_argument_begin|>", "bash"),
        ('{"name": "bash", "parameters": {', "bash"),
        ('<tool_call>{"name": 3}</tool_call>', None),
        ("<tool_call>not JSON</tool_call>", None),
        ('My "name": "Bob" is no call', None),
        ("", None),
    ],
)
def test_the_called_tool_is_found_in_many_formats(text: str, name: str | None) -> None:
    """An answer's first call counts, also if it is cut within the arguments."""
    found = called_tool(text)
    assert (found or "").split(":")[0] == (name or "")


@given(st.lists(st.integers(), unique=True, max_size=60), st.integers(1, 70))
def test_spread_items_are_in_order(items: list[int], count: int) -> None:
    """There are as many as asked for, in their order, with both ends."""
    found = spread(items, count)
    assert len(found) == min(count, len(items))
    assert [item for item in items if item in found] == list(found)
    if count > 1 and items:
        assert (found[0], found[-1]) == (items[0], items[-1])


def test_a_step_counts_the_messages_that_were_changed() -> None:
    """Equal messages that are other objects are no edits."""
    messages = ({"content": "a"}, {"content": "b"})
    assert SessionStep(messages, ({"content": "a"}, {"content": "c"})).edits == 1
