"""Requests of the Messages API that can't be mapped."""

from __future__ import annotations

from typing import Any

import pytest
from anthropic_talks import CALLED, TOOL, USE, mapped, result, user

from leyline_proxy.apis.anthropic.request import map_request
from leyline_proxy.apis.fields import FieldError


def nested(levels: int) -> dict[str, Any]:
    """An object in an object, and so on."""
    value: dict[str, Any] = {}
    for _ in range(levels):
        value = {"a": value}
    return value


@pytest.mark.parametrize(
    ("members", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": ["x"]}, "messages[0]"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": user({"text": "x"})}, "messages[0].content[0]"),
        ({"messages": user({"type": "text"})}, "messages[0].content[0].text"),
        (
            {"messages": user({"type": "text", "text": "a", "leyline": {"forget": True}})},
            "messages[0].content[0].leyline",
        ),
        (
            {
                "messages": user({"type": "text", "text": "a"}),
                "system": [{"type": "text", "text": "a", "leyline": {"forget": True}}],
            },
            "system[0].leyline",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{**USE, "leyline": {}}]}]},
            "messages[0].content[0].leyline",
        ),
        ({"messages": user(USE)}, "messages[0].content[0].type"),
        ({"messages": user({"type": "image"})}, "messages[0].content[0].source"),
        (
            {"messages": user({"type": "image", "source": {"type": "file", "file_id": "f"}})},
            "messages[0].content[0].source",
        ),
        (
            {"messages": user({"type": "document", "source": {"type": "base64"}})},
            "messages[0].content[0].source",
        ),
        (
            {"messages": user({"type": "container_upload", "file_id": "f"})},
            "messages[0].content[0].type",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{**USE, "input": "x"}]}]},
            "messages[0].content[0].input",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{**USE, "input": nested(5000)}]}]},
            "messages[0].content[0].input",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{**USE, "id": None}]}]},
            "messages[0].content[0].id",
        ),
        ({"messages": [result(tool_use_id=7)]}, "messages[0].content[0].tool_use_id"),
        ({"messages": [*CALLED, result(content=7)]}, "messages[2].content[0].content"),
        (
            {"messages": [*CALLED, result(content=[{"type": "tool_reference"}])]},
            "messages[2].content[0].content[0].tool_name",
        ),
        (
            {"messages": [*CALLED, result(content=[{"type": "tool_use"}])]},
            "messages[2].content[0].content[0].type",
        ),
        (
            {"messages": [{"role": "system", "content": [{"type": "tool_addition"}]}]},
            "messages[0].content[0].tool",
        ),
        ({"system": [{"type": "tool_addition"}]}, "system[0].type"),
        ({"system": 7}, "system"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"stop_sequences": "END"}, "stop_sequences"),
        ({"thinking": {"type": "deep"}}, "thinking.type"),
        ({"thinking": "deep"}, "thinking.type"),
        ({"output_config": []}, "output_config"),
        ({"output_config": {"effort": "most"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
        ({"tools": {}}, "tools"),
        ({"tools": ["ls"]}, "tools[0]"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "ls"}]}, "tools[0].input_schema"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": {"type": "some"}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "rm"}}, "tool_choice.name"),
        ({"mcp_servers": [{"url": "https://x.example"}]}, "mcp_servers"),
        ({"container": "c"}, "container"),
        ({"thread": {"type": "create"}}, "thread"),
    ],
)
def test_mistakes_name_the_field(members: dict[str, Any], param: str) -> None:
    """A refusal gives the client's own name for the thing that can't be mapped."""
    body = {"model": "m", "max_tokens": 9, "messages": CALLED, **members}
    with pytest.raises(FieldError) as refused:
        map_request(body)
    assert refused.value.param == param
    assert param in str(refused.value)


def test_tools_of_anthropics_own_are_named() -> None:
    """The message says which one isn't offered, and what to do."""
    tools = [TOOL, {"type": "code_execution_20250825", "name": "code_execution"}]
    with pytest.raises(FieldError, match=r"code_execution_20250825.*custom tool"):
        mapped(CALLED, tools=tools)
