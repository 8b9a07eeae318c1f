"""Tools that load late, come and go: the tools that a request offers, and the model's view of
them."""

from __future__ import annotations

from typing import Any

import pytest
from anthropic_talks import mapped, user

from leyline_proxy.apis.anthropic.request import map_request
from leyline_proxy.apis.fields import FieldError


def tool(name: str, **members: Any) -> dict[str, Any]:
    """A tool without parameters."""
    return {"name": name, "input_schema": {"type": "object"}, **members}


TOOLS = [
    tool("search"),
    tool("fetch", defer_loading=True),
    tool("mail", defer_loading=True),
    tool("write"),
]


def searched(*names: str, turn: int = 0) -> list[dict[str, Any]]:
    """A call of the search and what it found."""
    use = {"type": "tool_use", "id": f"u{turn}", "name": "search", "input": {}}
    found = [{"type": "tool_reference", "tool_name": name} for name in names]
    result = {"type": "tool_result", "tool_use_id": f"u{turn}", "content": found}
    return [{"role": "assistant", "content": [use]}, *user(result)]


def change(kind: str, **tool_members: Any) -> dict[str, Any]:
    """A system message that adds or removes a tool."""
    return {"role": "system", "content": [{"type": kind, "tool": tool_members}]}


def offered(messages: list[dict[str, Any]], tools: list[dict[str, Any]] = TOOLS) -> list[str]:
    """Names of the functions in the chat request."""
    body = mapped([*user({"type": "text", "text": "Go."}), *messages], tools=tools)
    return [each["function"]["name"] for each in body.get("tools", ())]


def test_deferred_tools_are_not_in_the_prompt() -> None:
    """A tool that nothing has loaded isn't offered; without any other there are no tools."""
    assert offered([]) == ["search", "write"]
    assert offered([], [tool("fetch", defer_loading=True)]) == []


def test_loaded_tools_stand_behind_the_others() -> None:
    """They come in the order of their loading, so that earlier text keeps its place in the
    prompt."""
    first = searched("mail")
    assert offered(first) == ["search", "write", "mail"]
    assert offered([*first, *searched("fetch", "mail", turn=1)]) == [
        "search",
        "write",
        "mail",
        "fetch",
    ]


def test_a_tool_that_was_called_is_loaded() -> None:
    """The load itself may have been cleared from the history since."""
    use = {"type": "tool_use", "id": "u", "name": "fetch", "input": {}}
    assert offered([{"role": "assistant", "content": [use]}]) == ["search", "write", "fetch"]


def test_tools_are_added_and_removed_on_the_way() -> None:
    """They come by reference or by definition; a removed tool may come back, at the end."""
    removal = change("tool_removal", type="tool_reference", name="search")
    addition = change("tool_addition", type="tool_reference", name="search")
    inline = change("tool_addition", type="tool_definition", definition=tool("new"))
    assert offered([removal]) == ["write"]
    assert offered([removal, inline, addition]) == ["write", "new", "search"]
    assert offered([removal, *searched()]) == ["write"]


def test_the_model_is_told_what_was_loaded() -> None:
    """References become text: chat messages have no such parts."""
    body = mapped([*user({"type": "text", "text": "Go."}), *searched("mail", "fetch")], tools=TOOLS)
    assert body["messages"][-1]["content"] == "Tool loaded: mail\nTool loaded: fetch"
    removal = change("tool_removal", type="tool_reference", name="search")
    assert mapped([removal])["messages"] == [{"role": "system", "content": "Tool removed: search"}]


def test_an_unknown_reference_changes_nothing() -> None:
    """A tool that the request doesn't declare can't be offered."""
    assert offered(searched("other")) == ["search", "write"]


def test_a_bad_inline_definition_is_refused_by_its_place() -> None:
    """The message names the block, not an entry of tools."""
    inline = change("tool_addition", type="tool_definition", definition={"name": "new"})
    with pytest.raises(FieldError) as refused:
        map_request({"model": "m", "max_tokens": 9, "messages": [inline]})
    assert refused.value.param == "messages[0].content[0].tool.definition.input_schema"


def test_documents_that_are_no_text_are_files() -> None:
    """An upstream that reads files is given them."""
    source = {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}
    found = mapped(
        user(
            {"type": "document", "source": source, "title": "a.pdf"}, {"type": "text", "text": "?"}
        )
    )
    file = {"filename": "a.pdf", "file_data": "data:application/pdf;base64,JVBERi0="}
    assert found["messages"][0]["content"][0] == {"type": "file", "file": file}


def test_a_search_by_anthropics_servers_loaded_its_tools() -> None:
    """A session that comes from there goes on with the tools that were found."""
    found = {"tool_references": [{"type": "tool_reference", "tool_name": "mail"}]}
    block = {"type": "tool_search_tool_result", "tool_use_id": "s", "content": found}
    assert offered([{"role": "assistant", "content": [block]}]) == ["search", "write", "mail"]
    for content in (None, [], {"tool_references": 7}):
        assert offered([{"role": "assistant", "content": [{**block, "content": content}]}]) == [
            "search",
            "write",
        ]
