"""Finding contents in a rendered prompt, whatever the contents are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from leyline_proxy.render.marks import content_spans

CONTENTS = st.lists(
    st.text(
        st.sampled_from("ab0 \n\t<>\ue000\ue001\ue002\uf8ff\u00a0é😀") | st.characters(),
        max_size=12,
    ),
    min_size=1,
    max_size=6,
)


def verbatim(messages: Sequence[Mapping[str, Any]]) -> str:
    """A template that writes every content as it is."""
    return "".join(f"<{m['role']}>{m['content']}</>" for m in messages)


def stripping(messages: Sequence[Mapping[str, Any]]) -> str:
    """A template that strips contents, and leaves out all but the last assistant's."""
    last = max((i for i, m in enumerate(messages) if m["role"] == "assistant"), default=-1)
    return "".join(
        f"<{m['role']}>{m['content'].strip()}\n"
        for i, m in enumerate(messages)
        if m["role"] != "assistant" or i == last
    )


def conversation(contents: list[str]) -> list[dict[str, Any]]:
    """Users and assistants in turn."""
    return [
        {"role": ("user", "assistant")[index % 2], "content": text}
        for index, text in enumerate(contents)
    ]


@given(CONTENTS, st.sampled_from([verbatim, stripping]))
def test_spans_hold_exactly_the_contents(contents: list[str], template: Any) -> None:
    """Marks are found out again also among private-use characters, digits and white space."""
    messages = conversation(contents)
    plain = template(messages)
    spans = content_spans(messages, plain, template)
    end = 0
    for span in spans:
        assert end <= span.start < span.end
        end = span.end
        assert plain[span.start : end] == contents[span.message].strip()
    if template is verbatim:
        assert {s.message for s in spans} == {i for i, t in enumerate(contents) if t.strip()}


def test_a_content_that_is_written_twice_has_no_span() -> None:
    """If a template repeats a content, neither place is its own."""
    messages = conversation(["once", "twice"])

    def render(list_: Sequence[Mapping[str, Any]]) -> str:
        return verbatim(list_) + str(list_[1]["content"])

    assert [s.message for s in content_spans(messages, render(messages), render)] == [0]


def test_a_template_that_looks_at_contents_falls_back_to_a_search() -> None:
    """Contents are sought where marks would change what the template does, if they are unique."""
    messages = conversation(["<x>hello</x>", "fine", "hello"])

    def render(list_: Sequence[Mapping[str, Any]]) -> str:
        return "".join(
            f"[{m['content']}]" if str(m["content"]).startswith("<x>") else f"({m['content']})"
            for m in list_
        )

    plain = render(messages)
    found = {s.message: plain[s.start : s.end] for s in content_spans(messages, plain, render)}
    assert found == {0: "<x>hello</x>", 1: "fine"}


def test_a_search_is_not_fooled_by_a_content_that_is_left_out() -> None:
    """A content that the template drops is not found inside another message's content."""
    messages = conversation(["<x>go</x>", "fine", "it is fine, and so on", "bye"])

    def render(list_: Sequence[Mapping[str, Any]]) -> str:
        first = "[" if str(list_[0]["content"]).startswith("<x>") else "("
        return first + "|".join(str(m["content"]) for i, m in enumerate(list_) if i != 1)

    plain = render(messages)
    found = {s.message: plain[s.start : s.end] for s in content_spans(messages, plain, render)}
    assert found == {0: "<x>go</x>", 2: "it is fine, and so on", 3: "bye"}
