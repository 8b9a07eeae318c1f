"""Changes to a request body that leave the other bytes untouched.

All functions work on the raw JSON: they cut out, append or replace members as byte ranges, so white
space, key order, number formats and escapes elsewhere survive.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from ..model.messages import Message

RESERVED = (
    "kv_hints",
    "custom_params",
    "cache_salt",
    "extra_key",
    "session_id",
    "priority",
    "routed_dp_rank",
    "data_parallel_rank",
    "kv_transfer_params",
    "ec_transfer_params",
)
"""Members that only the proxy may set; removed from clients' requests."""

_SPACE = re.compile(rb"[ \t\n\r]*")
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_SCALAR = re.compile(rb"[^,\]} \t\n\r]+")
_STRUCTURE = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[\[{]|[\]}]', re.DOTALL)


class WireError(ValueError):
    """Bytes that aren't a JSON object of the expected shape."""


def split_body(body: bytes) -> dict[str, msgspec.Raw]:
    """Return the members of a JSON object, each value as its own bytes. The last duplicate wins.

    Raises:
        WireError: not a JSON object.
    """
    try:
        return msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WireError("the body is no JSON object") from error


def repeats_members(body: bytes) -> bool:
    """Return True if two members of a JSON object have the same name.

    Raises:
        WireError: not a JSON object.
    """
    return sum(1 for _ in _members(body)) != len(split_body(body))


def add_members(body: bytes, members: Mapping[str, bytes]) -> bytes:
    """Return ``body`` with encoded members appended before its closing brace.

    Raises:
        WireError: not a JSON object.
    """
    if not members:
        return body
    end = len(body.rstrip(b" \t\n\r")) - 1
    if end < 1 or body[end : end + 1] != b"}":
        raise WireError("the body is no JSON object")
    start = len(body[:end].rstrip(b" \t\n\r"))
    added = b",".join(msgspec.json.encode(name) + b":" + value for name, value in members.items())
    comma = b"" if body[start - 1 : start] == b"{" else b","
    return b"".join((body[:start], comma, added, body[start:]))


def put_members(body: bytes, members: Mapping[str, bytes]) -> bytes:
    """Return ``body`` with encoded members, in place of those of the same names.

    Raises:
        WireError: not a JSON object.
    """
    # Nearly always there are none, which takes no parsing to see.
    if any(msgspec.json.encode(name) in body for name in members):
        with suppress(WireError):
            return replace_members(body, members)
    return add_members(body, members)


def remove_members(body: bytes, names: Collection[str]) -> bytes:
    """Return ``body`` without the top-level members called ``names``.

    Raises:
        WireError: not a JSON object.
    """
    if split_body(body).keys().isdisjoint(names):
        return body
    members = list(_members(body))
    spans = [(member.start, member.end) for member in members]
    doomed = [member.name in names for member in members]
    kept = [index for index, gone in enumerate(doomed) if not gone]
    if not kept:
        return body[: spans[0][0]] + body[spans[-1][1] :]
    parts = [body[: spans[0][0]]]
    for index in kept:
        start, end = spans[index]
        # The comma and white space before a member go with it.
        before = spans[index - 1][1] if index and index != kept[0] else start
        parts.append(body[before:end])
    parts.append(body[spans[-1][1] :])
    return b"".join(parts)


def take_member(body: bytes, name: str) -> tuple[bytes, bytes | None]:
    """Return ``body`` without the top-level member called ``name``, and the member's value.

    A body that lacks the member, or isn't a JSON object, is returned unchanged, with None. Fast for
    any length if the member is the last one.
    """
    if msgspec.json.encode(name) not in body:
        return body, None
    if (taken := _take_late_member(body, name)) is not None:
        return taken
    try:
        value = split_body(body).get(name)
        return (body, None) if value is None else (remove_members(body, {name}), bytes(value))
    except WireError:
        return body, None


def replace_members(body: bytes, members: Mapping[str, bytes]) -> bytes:
    """Return ``body`` with members' values replaced in place; missing members are appended.

    Raises:
        WireError: not a JSON object.
    """
    parts: list[bytes] = []
    cursor = 0
    found: set[str] = set()
    for member in _members(body):
        if member.name in members:
            parts += (body[cursor : member.value_start], members[member.name])
            cursor = member.end
            found.add(member.name)
    parts.append(body[cursor:])
    missing = {name: value for name, value in members.items() if name not in found}
    return add_members(b"".join(parts), missing)


def replace_messages(
    body: bytes, sent: Sequence[tuple[int | None, Message]], client: Sequence[Message]
) -> bytes:
    """Return ``body`` with another message list in which unchanged messages keep their bytes.

    Args:
        body: the client's request.
        sent: per message, its index in the client's list (None for a new one) and the message.
        client: the client's messages as decoded from ``body``.

    Raises:
        WireError: not a JSON object with a list of messages.
    """
    if len(sent) == len(client) and all(
        index == place and (message is client[place] or message == client[place])
        for place, (index, message) in enumerate(sent)
    ):
        return body
    try:
        raw = msgspec.json.decode(split_body(body)["messages"], type=list[msgspec.Raw])
    except (KeyError, msgspec.DecodeError) as error:
        raise WireError("the body has no list of messages") from error
    if len(raw) != len(client):
        raise WireError("the decoded messages are not those of the body")
    parts: list[bytes] = []
    for index, message in sent:
        same = index is not None and (message is client[index] or message == client[index])
        parts.append(bytes(raw[index]) if same and index is not None else _encode(message))
    return replace_members(body, {"messages": b"[" + b",".join(parts) + b"]"})


def _take_late_member(body: bytes, name: str) -> tuple[bytes, bytes] | None:
    """Do the work of :func:`take_member`; None if the member is first or has spaces around it."""
    mark = b"," + msgspec.json.encode(name) + b":"
    place = body.rfind(mark)
    start = place + len(mark)
    try:
        # The bytes after a top-level comma, in braces, are an object: that of the last members.
        last = split_body(b"{" + body[place + 1 :]) if place > 0 else {}
    except WireError:
        return None
    value = bytes(last.get(name, b""))
    end = start + len(value)
    return (body[:place] + body[end:], value) if value and body[start:end] == value else None


def _encode(message: Message) -> bytes:
    return msgspec.json.encode(message)


@dataclass(frozen=True, slots=True)
class _Member:
    name: str
    start: int
    """Position of the name's opening quote."""
    value_start: int
    end: int
    """Position after the value."""


def _members(body: bytes) -> Iterator[_Member]:
    position = _skip_space(body, 0)
    if body[position : position + 1] != b"{":
        raise WireError("the body is no JSON object")
    position = _skip_space(body, position + 1)
    while body[position : position + 1] != b"}":
        name = _STRING.match(body, position)
        if name is None:
            raise WireError("the body is no JSON object")
        colon = _skip_space(body, name.end())
        value = _skip_space(body, colon + 1)
        end = _value_end(body, value)
        try:
            word = msgspec.json.decode(name.group(), type=str)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise WireError("the body is no JSON object") from error
        yield _Member(word, position, value, end)
        position = _skip_space(body, end)
        if body[position : position + 1] == b",":
            position = _skip_space(body, position + 1)


def _skip_space(body: bytes, position: int) -> int:
    match = _SPACE.match(body, position)
    return match.end() if match else position


def _value_end(body: bytes, start: int) -> int:
    first = body[start : start + 1]
    if first == b'"':
        match = _STRING.match(body, start)
    elif first in (b"{", b"["):
        return _container_end(body, start)
    else:
        match = _SCALAR.match(body, start)
    if match is None:
        raise WireError("the body is no JSON object")
    return match.end()


def _container_end(body: bytes, start: int) -> int:
    depth = 0
    for match in _STRUCTURE.finditer(body, start):
        kind = match.group()[:1]
        if kind in b"{[":
            depth += 1
        elif kind in b"]}":
            depth -= 1
            if depth == 0:
                return match.end()
    raise WireError("the body is no JSON object")
