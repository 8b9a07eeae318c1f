"""Tools that a conversation offers: some load late, others were added or removed.

A tool with ``defer_loading`` is no part of the prompt until something in the conversation names
it. Loaded tools come after the others, in the order of their loading, so that the tools of an
earlier turn's prompt stay at the beginning.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Tool = Mapping[str, Any]

REFERENCE = "tool_reference"
"""Type of the block that loads a tool; found in results of tools and of searches for tools."""


_SEARCHED = "tool_search_tool_result"


def offered_tools(tools: Sequence[Any], messages: object) -> list[tuple[str, Any]]:
    """Return the tools at the end of the conversation, each with its field.

    Args:
        tools: the request's. Invalid definitions are kept, so that their refusal names the field.
        messages: the request's, unchecked.
    """
    placed = [(f"tools[{index}]", tool) for index, tool in enumerate(tools)]
    declared = {_name(tool): (where, tool) for where, tool in placed}
    offered = {where: tool for where, tool in placed if not _is_deferred(tool)}
    removed: set[str] = set()
    for kind, place, change in _changes(messages):
        name = change if isinstance(change, str) else _name(change)
        if not isinstance(change, str):
            declared[name] = (place, change)
        where, tool = declared.get(name, ("", None))
        if kind == "tool_removal":
            removed.add(name)
            offered.pop(where, None)
        elif tool is not None and not (kind == "tool_use" and name in removed):
            removed.discard(name)
            offered.setdefault(where, tool)
    return list(offered.items())


def changed_tool(block: Mapping[str, Any]) -> str | None:
    """Return the name of the tool that a block loads, adds or removes."""
    found = _of_block(block)
    return None if found is None else found if isinstance(found, str) else _name(found)


def _changes(messages: object) -> Iterator[tuple[str, str, Any]]:
    """Yield each change of tools: its kind, its field, and a tool's name or definition."""
    for index, message in enumerate(messages if isinstance(messages, list) else ()):
        content = message.get("content") if isinstance(message, dict) else None
        for where, block in _blocks(f"messages[{index}].content", content):
            if (tool := _of_block(block)) is not None:
                yield block["type"], f"{where}.tool.definition", tool
            # A called tool was known; the block that loaded it may be gone from the history.
            elif block["type"] == "tool_use" and isinstance(block.get("name"), str):
                yield "tool_use", where, block["name"]
            elif block["type"] in ("tool_result", _SEARCHED):
                for place, part in _blocks(f"{where}.content", _results(block)):
                    if part["type"] == REFERENCE and (loaded := _of_block(part)) is not None:
                        yield REFERENCE, place, loaded


def _results(block: Mapping[str, Any]) -> object:
    """Return the blocks in a result; those of a search for tools are one level down."""
    content = block.get("content")
    if block["type"] == _SEARCHED:
        return content.get("tool_references") if isinstance(content, dict) else None
    return content


def _blocks(where: str, content: object) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, block in enumerate(content if isinstance(content, list) else ()):
        if isinstance(block, dict) and isinstance(block.get("type"), str):
            yield f"{where}[{number}]", block


def _of_block(block: Mapping[str, Any]) -> str | Tool | None:
    match block:
        case {"type": "tool_reference", "tool_name": str(name)}:
            return name
        case {
            "type": "tool_addition" | "tool_removal",
            "tool": {"type": "tool_reference", "name": str(name)},
        }:
            return name
        case {
            "type": "tool_addition",
            "tool": {"type": "tool_definition", "definition": dict(definition)},
        }:
            return definition
    return None


def _name(tool: object) -> str:
    name = tool.get("name") if isinstance(tool, Mapping) else None
    return name if isinstance(name, str) else ""


def _is_deferred(tool: object) -> bool:
    return isinstance(tool, Mapping) and tool.get("defer_loading") is True
