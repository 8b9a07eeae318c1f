"""Map system prompts and messages with content blocks to chat messages.

The mapping of a message doesn't depend on later ones, so the mapping of a conversation begins with
that of its earlier turns. ``cache_control`` moves from turn to turn and is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableSet, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import msgspec

from leyline_policies.failures import is_failure_text
from leyline_policies.verbs import ANNOTATION

from ...model.messages import Message, text_of
from ...request.annotations import said_by_both
from ..fields import FieldError, UnreadableError, string
from ..foreign import joined_texts, shown_text
from .compaction import COMPACTION, Opens, last_compaction, opened, uncovered
from .deferred import REFERENCE, changed_tool
from .history import rule_of

Block = Mapping[str, Any]
NOTHING: Mapping[str, str] = MappingProxyType({})

_ATTRIBUTION = "x-anthropic-billing-header:"
"""Prefix of the line that Claude Code puts before its system prompt. It is meant for Anthropic's
accounts and changes with each request, so no prompt would begin like the last one."""

_FAILED = "Error"
"""Prefix of a failed result that doesn't report it itself: chat messages have no ``is_error``."""

_TOLD = {"tool_addition": "Tool added", "tool_removal": "Tool removed"}
"""Texts that inform the model of tools that come and go in the conversation."""

_LOADED = "Tool loaded"

_UNNAMED = "document.pdf"

_ROLES = ("user", "assistant", "system")
_APART = ("tool_result", COMPACTION)
"""Blocks of a user's message that are no parts of it."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A chat message and its source field in the request."""

    message: Message
    origin: str


def system_prompt(system: object) -> Iterator[Placed]:
    """Yield the system message; nothing for a prompt without text.

    Raises:
        FieldError: a field is wrong; the error names it and what it should be.
    """
    if system is None:
        return
    texts = [_unattributed(text) for text in _texts("system", system)]
    text = "\n".join(filter(None, texts))
    if text:
        yield Placed({"role": "system", "content": text}, "system")


@dataclass(frozen=True, slots=True)
class _Reading:
    """The manner in which a message is read."""

    foreign: MutableSet[str]
    """Takes the types of what only another provider can read."""
    answered: bool
    """True if an answer follows. What can't be read is then shown as it is in a history; else it is
    refused, so that nothing that is asked now is lost in silence."""


def conversation(
    messages: object, opens: Opens = lambda _: None, foreign: MutableSet[str] | None = None
) -> Iterator[Placed]:
    """Yield the chat messages of ``messages``: one for each, and one for each tool result.

    The last compaction stands in place of everything before it.

    Args:
        opens: opens compaction blocks.
        foreign: takes the types of blocks that only another provider can read.

    Raises:
        FieldError: a field is wrong; the error names it and what it should be.
    """
    if not isinstance(messages, list):
        raise FieldError("messages", "messages must be a list of messages.")
    if not messages:
        raise FieldError("messages", "messages must hold at least one message.")
    answer, seen = _last_answer(messages), set[str]() if foreign is None else foreign
    place = last_compaction(messages)
    for index, given in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(given, dict):
            raise FieldError(where, f"{where} must be an object with role and content.")
        if place is not None and index == place[0]:
            compacted, field = opened(messages, place, opens)
            yield from (Placed(each, field) for each in compacted.messages())
        message = uncovered(given, index, place)
        if message is None:
            continue
        # A message's annotation applies to all its parts; a tool result may have its own.
        note = {ANNOTATION: message[ANNOTATION]} if ANNOTATION in message else {}
        for placed in _message(where, message, _Reading(seen, index < answer)):
            yield Placed(_noted(note, placed.message), placed.origin) if note else placed


def _noted(note: Message, message: Message) -> Message:
    """Return a message with its source's annotation, unless it has its own."""
    if ANNOTATION not in message:
        return note | message
    return message | {ANNOTATION: said_by_both(note[ANNOTATION], message[ANNOTATION])}


def _last_answer(messages: Sequence[Any]) -> int:
    """Return the number of the last answer; one that the request wants continued isn't it."""
    for index in range(len(messages) - 2, -1, -1):
        if isinstance(messages[index], dict) and messages[index].get("role") == "assistant":
            return index
    return -1


def _message(where: str, message: Mapping[str, Any], reading: _Reading) -> Iterator[Placed]:
    role, content = message.get("role"), message.get("content")
    if role not in _ROLES:
        raise FieldError(f"{where}.role", f"{where}.role must be one of {', '.join(_ROLES)}.")
    field = f"{where}.content"
    if role == "system":
        texts = _texts(field, content, _TOLD)
        yield Placed({"role": "system", "content": "\n".join(texts)}, where)
    elif isinstance(content, str):
        yield Placed({"role": role, "content": content}, where)
    elif not isinstance(content, list):
        raise FieldError(field, f"{field} must be a string or a list of content blocks.")
    elif role == "user":
        yield from _user(where, content, reading)
    else:
        yield Placed(_assistant(field, content, reading), where)


def _user(where: str, content: Sequence[Any], reading: _Reading) -> Iterator[Placed]:
    """Yield the results first, wherever the client has put them: an engine expects them right
    after their calls. The rest follows as one message."""
    parts: list[dict[str, Any]] = []
    answers = False
    # Templates want the user's turn in its place, also if nothing of it can be shown.
    empty = all(isinstance(raw, dict) and raw.get("type") not in _APART for raw in content)
    for number, raw in enumerate(content):
        place = f"{where}.content[{number}]"
        block = _block(place, raw)
        if block["type"] == COMPACTION:
            continue
        if block["type"] == "tool_result":
            answers = True
            yield Placed(_result(place, block, reading), place)
        else:
            parts += _parts(place, block, reading)
    # An empty text beside others says nothing, but would be a turn of its own after results.
    said = [part for part in parts if part.get("text") != ""]
    if said or (not answers and (parts or empty)):
        yield Placed({"role": "user", "content": _plain(said or parts[:1])}, where)


def _result(place: str, block: Block, reading: _Reading) -> Message:
    identifier = string(place, block, "tool_use_id")
    content = block.get("content", "")
    field = f"{place}.content"
    shown: str | list[dict[str, Any]]
    if isinstance(content, str) or content is None:
        shown = content or ""
    elif isinstance(content, list):
        each = (_shown(f"{field}[{i}]", part, reading) for i, part in enumerate(content))
        parts = [part for found in each for part in found]
        texts = [part["text"] for part in parts if part["type"] == "text"]
        # Templates differ in how they show a result's parts, if at all.
        shown = "\n".join(texts) if len(texts) == len(parts) else parts
    else:
        raise FieldError(field, f"{field} must be a string or a list of content blocks.")
    message: Message = {"role": "tool", "tool_call_id": identifier, "content": shown}
    if block.get("is_error") is True:
        message = _failed(message)
    return message | ({ANNOTATION: block[ANNOTATION]} if ANNOTATION in block else {})


def _shown(place: str, raw: object, reading: _Reading) -> list[dict[str, Any]]:
    """Return a part of a result; none if it is left out."""
    block = _block(place, raw)
    if block["type"] == REFERENCE:
        return [{"type": "text", "text": _told(place, block, _LOADED)}]
    return _parts(place, block, reading)


def _told(place: str, block: Block, verb: str) -> str:
    name = changed_tool(block)
    if name is None:
        field = f"{place}.{'tool_name' if block['type'] == REFERENCE else 'tool'}"
        raise FieldError(field, f"{field} must name a tool.")
    return f"{verb}: {name}"


def _failed(message: Message) -> Message:
    content = message["content"]
    if is_failure_text(text_of(message)):
        return message
    if isinstance(content, list):
        return {**message, "content": [{"type": "text", "text": _FAILED}, *content]}
    return {**message, "content": f"{_FAILED}: {content}" if content else _FAILED}


def _assistant(field: str, content: Sequence[Any], reading: _Reading) -> Message:
    """Return the assistant's message. Texts and thinking are joined as the engine gave them,
    without a separator; items of another provider are shown between them."""
    texts: list[tuple[str, bool]] = []
    thinking: list[str] = []
    calls: list[dict[str, Any]] = []
    for number, raw in enumerate(content):
        place = f"{field}[{number}]"
        block = _block(place, raw)
        match block["type"]:
            case "text":
                texts.append((string(place, block, "text"), False))
            case "thinking":
                thinking.append(string(place, block, "thinking"))
            case "compaction":
                pass  # opened before, or one that failed
            case "tool_use":
                calls.append(_call(place, block))
            case _:
                texts.append((_foreign(block, reading), True))
    text = joined_texts(texts)
    message: Message = {"role": "assistant", "content": text or (None if calls else "")}
    if any(thinking):
        message["reasoning_content"] = "".join(thinking)
    if calls:
        message["tool_calls"] = calls
    return message


def _call(place: str, block: Block) -> dict[str, Any]:
    given = block.get("input")
    if not isinstance(given, dict):
        raise FieldError(f"{place}.input", f"{place}.input must be an object.")
    try:
        arguments = msgspec.json.encode(given).decode()
    except RecursionError:
        raise FieldError(f"{place}.input", f"{place}.input is nested too deeply.") from None
    function = {"name": string(place, block, "name"), "arguments": arguments}
    return {"id": string(place, block, "id"), "type": "function", "function": function}


def _parts(place: str, block: Block, reading: _Reading) -> list[dict[str, Any]]:
    """Return the part of a user's message or of a result; none if it is left out."""
    try:
        return [_part(place, block)]
    except UnreadableError:
        if not reading.answered:
            raise
    text = _foreign(block, reading)
    return [{"type": "text", "text": text}] if text else []


def _foreign(block: Block, reading: _Reading) -> str:
    """Return the text for a block that only another provider can read; empty for none."""
    rule = rule_of(block)
    if not rule.native:
        reading.foreign.add(block["type"])
    return shown_text(block, rule)


def _part(place: str, block: Block) -> dict[str, Any]:
    match block["type"]:
        case "text":
            return {"type": "text", "text": string(place, block, "text")}
        case "image":
            return {"type": "image_url", "image_url": {"url": _image(place, block)}}
        case "document":
            return _document(place, block)
        case "search_result":
            texts = _texts(f"{place}.content", block.get("content"))
            heads = (string(place, block, "title"), string(place, block, "source"))
            return {"type": "text", "text": "\n".join((*heads, *texts))}
    raise _unknown(place, block, "text, image, document, search_result or tool_result")


def _image(place: str, block: Block) -> str:
    match block.get("source"):
        case {"type": "base64", "media_type": str(kind), "data": str(data)}:
            return f"data:{kind};base64,{data}"
        case {"type": "url", "url": str(url)}:
            return url
    field = f"{place}.source"
    raise UnreadableError(
        field, f"{field} must be of type base64 (media_type and data) or url; files aren't kept."
    )


def _document(place: str, block: Block) -> dict[str, Any]:
    """Return a document's text, or a file. An upstream that reads no files refuses it itself."""
    field = f"{place}.source"
    title = block.get("title")
    heads = [head for head in (title, block.get("context")) if isinstance(head, str) and head]
    match block.get("source"):
        case {"type": "text", "data": str(data)}:
            texts = [data]
        case {"type": "content", "content": content}:
            texts = _texts(f"{field}.content", content)
        case {"type": "base64", "media_type": str(kind), "data": str(data)}:
            file = {"filename": title or _UNNAMED, "file_data": f"data:{kind};base64,{data}"}
            return {"type": "file", "file": file}
        case _:
            raise UnreadableError(
                field, f"{field} must be of type text, content or base64: nothing is fetched here."
            )
    return {"type": "text", "text": "\n".join((*heads, *texts))}


def _texts(field: str, content: object, told: Mapping[str, str] = NOTHING) -> list[str]:
    """Return the texts of a string or of text blocks.

    Args:
        told: texts for blocks about tools, by type; by default no such blocks are allowed.
    """
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise FieldError(field, f"{field} must be a string or a list of text blocks.")
    texts: list[str] = []
    for number, raw in enumerate(content):
        place = f"{field}[{number}]"
        block = _block(place, raw)
        if block["type"] in told:
            texts.append(_told(place, block, told[block["type"]]))
        elif block["type"] == "text":
            texts.append(string(place, block, "text"))
        else:
            raise _unknown(place, block, ", ".join(("text", *told)))
    return texts


def _plain(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    if not parts:
        return ""
    only = parts[0] if len(parts) == 1 else {}
    return str(only["text"]) if "text" in only else parts


def _block(place: str, raw: object) -> Block:
    if isinstance(raw, dict) and isinstance(raw.get("type"), str):
        if ANNOTATION in raw and raw["type"] != "tool_result":
            field = f"{place}.{ANNOTATION}"
            raise FieldError(field, f"{field}: only a message or a tool_result may have it.")
        return raw
    raise FieldError(place, f"{place} must be a content block: an object with a type.")


def _unknown(place: str, block: Block, known: str) -> UnreadableError:
    return UnreadableError(
        f"{place}.type", f"{place}.type: {block['type'][:80]!r} isn't taken here, only {known}."
    )


def _unattributed(text: str) -> str:
    return text.partition("\n")[2] if text.startswith(_ATTRIBUTION) else text
