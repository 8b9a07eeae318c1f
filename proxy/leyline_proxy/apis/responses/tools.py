"""Map tool definitions, and the choice among them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..fields import FieldError, string
from .calls import CUSTOM_MEMBER, SHELL, Tool
from .content import typed

_LEFT_OUT = ("web_search", "image_generation", "tool_search")
"""Tools that OpenAI's servers run and agents always offer; agents work without them, too."""

_CHOICES = ("auto", "none", "required")

_SHELL_DEFINITION = {
    "name": SHELL,
    "description": "Runs a command on the user's machine and returns its output.",
    "parameters": {
        "type": "object",
        "properties": {
            "command": {"type": "array", "items": {"type": "string"}},
            "working_directory": {"type": "string"},
            "timeout_ms": {"type": "integer"},
        },
        "required": ["command"],
        "additionalProperties": False,
    },
}


@dataclass(frozen=True, slots=True)
class ToolBook:
    """A request's tools, by their names for the engine."""

    definitions: tuple[dict[str, Any], ...]
    """Definitions for the chat request."""
    tools: Mapping[str, Tool]

    def called(self, chat_name: str) -> Tool:
        """Return the tool of a call; a function for an undefined name."""
        return self.tools.get(chat_name) or Tool("function", chat_name)

    def only(self, chat_names: set[str]) -> ToolBook:
        """Return a book that offers only the tools of these names."""
        kept = [one for one in self.definitions if one["function"]["name"] in chat_names]
        return ToolBook(tuple(kept), self.tools)


def read_tools(lists: Sequence[tuple[str, object]]) -> ToolBook:
    """Return the tools of a request.

    Args:
        lists: tool lists, each with its field.

    Raises:
        FieldError: a definition is wrong, or OpenAI's servers run the tool.
    """
    definitions: dict[str, dict[str, Any]] = {}
    tools: dict[str, Tool] = {}
    for field, given in lists:
        for place, raw, namespace in _each(field, given):
            found = _read(place, raw, namespace)
            if found is None:
                continue
            tool, function = found
            name = tool.chat_name
            if tools.setdefault(name, tool) != tool:
                raise FieldError(f"{place}.name", f"{place}.name is another tool's already.")
            definitions[name] = {"type": "function", "function": {**function, "name": name}}
    return ToolBook(tuple(definitions.values()), tools)


def choose_tools(choice: object, book: ToolBook) -> tuple[dict[str, Any], ToolBook]:
    """Return the chat request's members for the choice among tools, and the tools to offer.

    Raises:
        FieldError: the choice is unknown, or no tool matches it.
    """
    if choice is None:
        return {}, book
    if isinstance(choice, str):
        return _choose_mode("tool_choice", choice, book), book
    kind = choice.get("type") if isinstance(choice, dict) else None
    if not isinstance(choice, dict) or not isinstance(kind, str):
        raise FieldError(
            "tool_choice", f"tool_choice must be {', '.join(_CHOICES)}, or an object with a type."
        )
    if kind == "allowed_tools":
        field = "tool_choice.tools"
        allowed = choice.get("tools")
        if not isinstance(allowed, list):
            raise FieldError(field, f"{field} must be a list of tools.")
        names = {_named(f"{field}[{i}]", raw).chat_name for i, raw in enumerate(allowed)}
        book = book.only(names)
        return _choose_mode("tool_choice.mode", choice.get("mode", "auto"), book), book
    name = _named("tool_choice", choice).chat_name
    if name not in book.tools:
        raise FieldError("tool_choice", "tool_choice must name one of the tools.")
    return {"tool_choice": {"type": "function", "function": {"name": name}}}, book


def _choose_mode(field: str, mode: object, book: ToolBook) -> dict[str, Any]:
    if mode not in _CHOICES:
        raise FieldError(field, f"{field} must be one of {', '.join(_CHOICES)}.")
    if book.definitions:
        return {"tool_choice": mode}
    if mode == "required":
        raise FieldError(field, f"{field} is required, but there is no tool that can run here.")
    return {}


def _named(place: str, raw: object) -> Tool:
    """Return the tool that a choice names."""
    item = typed(place, raw)
    if item["type"] == SHELL:
        return Tool("local_shell", SHELL)
    if item["type"] not in ("function", "custom"):
        raise _refused(place, item["type"])
    namespace = item.get("namespace")
    namespace = namespace if isinstance(namespace, str) else None
    return Tool("function", string(place, item, "name"), namespace)


def _each(field: str, given: object) -> list[tuple[str, Mapping[str, Any], str | None]]:
    """Return tools with their fields and their namespaces."""
    if given is None:
        return []
    if not isinstance(given, list):
        raise FieldError(field, f"{field} must be a list of tool definitions.")
    found: list[tuple[str, Mapping[str, Any], str | None]] = []
    for index, raw in enumerate(given):
        place = f"{field}[{index}]"
        tool = typed(place, raw)
        if tool["type"] != "namespace":
            found.append((place, tool, None))
            continue
        name, inner = string(place, tool, "name"), tool.get("tools")
        if not isinstance(inner, list):
            raise FieldError(f"{place}.tools", f"{place}.tools must be a list of tool definitions.")
        for number, one in enumerate(inner):
            where = f"{place}.tools[{number}]"
            found.append((where, typed(where, one), name))
    return found


def _read(
    place: str, raw: Mapping[str, Any], namespace: str | None
) -> tuple[Tool, dict[str, Any]] | None:
    kind = raw["type"]
    if kind.startswith(_LEFT_OUT):
        return None
    if kind == SHELL and namespace is None:
        return Tool("local_shell", SHELL), _SHELL_DEFINITION
    if kind not in ("function", "custom"):
        raise _refused(place, kind)
    name = string(place, raw, "name")
    if not name:
        raise FieldError(f"{place}.name", f"{place}.name must not be empty.")
    described = raw.get("description")
    description = described if isinstance(described, str) else ""
    if kind == "custom":
        return Tool("custom", name, namespace), _custom(place, raw, description)
    function: dict[str, Any] = {"description": description} if description else {}
    parameters = raw.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise FieldError(f"{place}.parameters", f"{place}.parameters must be a JSON schema.")
    function["parameters"] = parameters or {"type": "object", "properties": {}}
    if raw.get("strict") is True:
        function["strict"] = True
    return Tool("function", name, namespace), function


def _custom(place: str, raw: Mapping[str, Any], description: str) -> dict[str, Any]:
    """Return a function that takes the tool's free text. Its description shows a grammar, which
    isn't enforced."""
    grammar = raw.get("format")
    if grammar is not None and not isinstance(grammar, dict):
        raise FieldError(f"{place}.format", f"{place}.format must be an object with a type.")
    texts = [description]
    if grammar is not None and grammar.get("type") == "grammar":
        syntax = string(f"{place}.format", grammar, "syntax")
        definition = string(f"{place}.format", grammar, "definition")
        texts.append(f"The input must match this {syntax} grammar:\n{definition}")
    text = "\n\n".join(filter(None, texts))
    schema = {
        "type": "object",
        "properties": {CUSTOM_MEMBER: {"type": "string"}},
        "required": [CUSTOM_MEMBER],
        "additionalProperties": False,
    }
    return {**({"description": text} if text else {}), "parameters": schema}


def _refused(place: str, kind: str) -> FieldError:
    return FieldError(
        f"{place}.type",
        f"{place}.type: {kind[:80]!r} runs on OpenAI's servers, or has a form that isn't "
        "offered here. Leave it out, or define a function or a custom tool.",
    )
