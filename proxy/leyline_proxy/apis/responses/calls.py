"""Map tool calls and their results between items and chat messages.

A custom tool is a function with one string, ``input``; a tool in a namespace is a function whose
name begins with the namespace's; the local shell is a function ``local_shell``. Other tools of
OpenAI's that a client carries out aren't offered; their calls in a history are calls of functions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from ..call_arguments import readable_arguments
from ..fields import FieldError, string
from ..foreign import readable
from .content import Foreign, Item, joined_content

SHELL = "local_shell"
CUSTOM_MEMBER = "input"

_CLIENTS = {
    "shell_call": ("shell", ("action",)),
    "apply_patch_call": ("apply_patch", ("operation",)),
    "computer_call": ("computer", ("action", "actions")),
}
"""Tools of OpenAI's that a client carries out, by their calls: the function, and the members with
its arguments."""

CALLS = frozenset({"function_call", "custom_tool_call", "local_shell_call", *_CLIENTS})
RESULTS = frozenset(f"{kind}_output" for kind in CALLS)

_SHELL_MEMBERS = ("command", "timeout_ms", "working_directory", "env", "user")

Kind = Literal["function", "custom", "local_shell"]


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool as the client defined it."""

    kind: Kind
    name: str
    namespace: str | None = None

    @property
    def chat_name(self) -> str:
        """Name of the function in a chat request."""
        if not self.namespace:
            return self.name
        between = "" if self.namespace.endswith("__") else "__"
        return f"{self.namespace}{between}{self.name}"

    @property
    def item_type(self) -> str:
        """Type of the tool's calls."""
        if self.kind == "custom":
            return "custom_tool_call"
        return "function_call" if self.kind == "function" else "local_shell_call"


def chat_call(place: str, item: Item) -> dict[str, Any]:
    """Return an item as a call of a chat message.

    Raises:
        FieldError: a field is wrong; the error names it and what it should be.
    """
    call_id = string(place, item, "call_id")
    match item["type"]:
        case "custom_tool_call":
            kind: Kind = "custom"
            arguments = _spaced({CUSTOM_MEMBER: string(place, item, "input")})
            name = string(place, item, "name")
        case "local_shell_call":
            kind, name = "local_shell", SHELL
            arguments = _shell_arguments(f"{place}.action", item.get("action"))
        case str(known) if known in _CLIENTS:
            kind = "function"
            name, members = _CLIENTS[known]
            shown = {member: item[member] for member in members if item.get(member)}
            only = next(iter(shown.values())) if len(shown) == 1 else shown
            arguments = _spaced(only if isinstance(only, dict) else shown)
        case _:
            kind, name = "function", string(place, item, "name")
            arguments = readable_arguments(string(place, item, "arguments"))
    namespace = item.get("namespace")
    tool = Tool(kind, name, namespace if isinstance(namespace, str) else None)
    function = {"name": tool.chat_name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def chat_result(place: str, item: Item, foreign: Foreign) -> dict[str, Any]:
    """Return an item as a ``tool`` message. Its call may be gone from the history, as for engines.

    Args:
        foreign: as for :func:`~.content.joined_content`.

    Raises:
        FieldError: a field is wrong; the error names it and what it should be.
    """
    # OpenAI's schema has no call_id for results of the local shell, and lets others leave it out.
    named = item.get("call_id", item.get("id"))
    if named is not None and not isinstance(named, str):
        raise FieldError(f"{place}.call_id", f"{place}.call_id must be a string.")
    output = item.get("output")
    match item["type"]:
        case "shell_call_output":
            content: Any = "\n".join(readable(output))
        case "apply_patch_call_output":
            content = "\n".join(readable([item.get("status"), output]))
        case "computer_call_output":
            content = _screenshot(f"{place}.output", output, foreign)
        case _:
            content = joined_content(f"{place}.output", output, foreign)
    identified = {} if named is None else {"tool_call_id": named}
    return {"role": "tool", **identified, "content": content}


def _screenshot(field: str, output: object, foreign: Foreign) -> Any:
    """Return the content for the picture of a screen."""
    if not isinstance(output, dict):
        return joined_content(field, output, foreign)
    return joined_content(field, [{**output, "type": "input_image"}], foreign)


def opened_call(tool: Tool, item_id: str, call_id: str) -> dict[str, Any]:
    """Return a call's item without its arguments."""
    head: dict[str, Any] = {"type": tool.item_type, "id": item_id, "call_id": call_id}
    if tool.kind != "local_shell":
        head |= {"name": tool.name, "arguments" if tool.kind == "function" else "input": ""}
    if tool.namespace:
        head["namespace"] = tool.namespace
    return {**head, "status": "in_progress"}


def whole_call(
    tool: Tool, item_id: str, call_id: str, arguments: str, status: str
) -> dict[str, Any]:
    """Return a call's item.

    Args:
        arguments: from the engine. A local shell's call without a command in them becomes a
            function call, which takes any.
    """
    action = _shell_action(arguments) if tool.kind == "local_shell" else None
    if tool.kind == "local_shell" and action is None:
        tool = Tool("function", SHELL)
    item = {**opened_call(tool, item_id, call_id), "status": status}
    if tool.kind == "function":
        item["arguments"] = arguments
    elif tool.kind == "custom":
        item["input"] = custom_input(arguments)
    else:
        item["action"] = action
    return item


def custom_input(arguments: str) -> str:
    """Return a custom tool's input; the whole arguments if they have another form."""
    found = _object(arguments).get(CUSTOM_MEMBER)
    return found if isinstance(found, str) else arguments


def _shell_arguments(place: str, action: object) -> str:
    command = action.get("command") if isinstance(action, Mapping) else None
    if not isinstance(action, Mapping) or not _is_command(command):
        raise FieldError(f"{place}.command", f"{place}.command must be a list of strings.")
    return _spaced({name: action[name] for name in _SHELL_MEMBERS if action.get(name)})


def _shell_action(arguments: str) -> dict[str, Any] | None:
    given = _object(arguments)
    if not _is_command(given.get("command")):
        return None
    own = {name: given[name] for name in _SHELL_MEMBERS if given.get(name)}
    return {"type": "exec", "env": {}, **own}


def _is_command(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(word, str) for word in value)


def _object(text: str) -> Mapping[str, Any]:
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {}


def _spaced(value: Mapping[str, Any]) -> str:
    """Return JSON with spaces, as engines write parsed calls."""
    return json.dumps(value, ensure_ascii=False)
