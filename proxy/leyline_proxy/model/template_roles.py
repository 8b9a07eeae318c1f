"""Roles of messages that an engine's chat template shows, and messages written for it. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .messages import Message

_PROBE = "ley-probe"
_SYSTEM = {"role": "system", "content": "a"}
_USER = {"role": "user", "content": "b"}
_BEGINS = re.compile(rb'"messages"\s*:\s*\[\s*\{\s*"role"\s*:\s*"system"')
"""The beginning of a list whose first message is the system's."""
_OPEN, _CLOSE = "<system-reminder>\n", "\n</system-reminder>"
"""Frame of instructions in a user's message, as coding agents write them and models know them."""


@dataclass(frozen=True, slots=True)
class TemplateRoles:
    """Roles that a template shows. One that it doesn't show is refused, or left out silently."""

    developer: bool = True
    """True if it shows a developer's message at the beginning."""
    late_developer: bool = True
    """True if it shows a developer's message after others."""
    late_system: bool = True
    """True if it shows a system message after others."""

    @property
    def all(self) -> bool:
        """True if messages need no change."""
        return self.developer and self.late_developer and self.late_system

    def __and__(self, other: TemplateRoles) -> TemplateRoles:
        """Return the roles that both templates show."""
        return TemplateRoles(
            self.developer and other.developer,
            self.late_developer and other.late_developer,
            self.late_system and other.late_system,
        )


def roles_shown(render: Callable[[list[Mapping[str, Any]]], str]) -> TemplateRoles:
    """Return the roles that a template shows.

    Args:
        render: returns the prompt's text; raises if the template refuses the messages.
    """

    def shows(*messages: Mapping[str, Any]) -> bool:
        try:
            return _PROBE in render([*messages])
        except Exception:  # a template may raise anything
            return False

    if not shows(_SYSTEM, {**_USER, "content": _PROBE}):
        return TemplateRoles()  # it takes no instructions in any place: its refusal says so
    developer, system = ({"role": role, "content": _PROBE} for role in ("developer", "system"))
    return TemplateRoles(
        developer=shows(developer, _USER),
        late_developer=shows(_SYSTEM, _USER, developer, _USER),
        late_system=shows(_SYSTEM, _USER, system, _USER),
    )


def written_for(messages: object, roles: TemplateRoles) -> Any:
    """Return as many messages in the same order, with instructions in a role that is shown.

    A developer's message becomes a system message, and one after others a user's, in its place:
    merged into the first, it would change the prompt's beginning, and no KV would fit.

    Returns:
        The same object if nothing changes, or if it is no list of messages.
    """
    if roles.all or not isinstance(messages, list):
        return messages
    found = [_written(message, index, roles) for index, message in enumerate(messages)]
    changed = any(one is not other for one, other in zip(found, messages, strict=True))
    return found if changed else messages


def framed(messages: Sequence[Any], written: Sequence[Any]) -> frozenset[int]:
    """Return the places of messages whose text :func:`written_for` has put into a frame."""
    pairs = enumerate(zip(messages, written, strict=True))
    return frozenset(
        index for index, (one, other) in pairs if one is not other and other["role"] == "user"
    )


def _written(message: Any, index: int, roles: TemplateRoles) -> Any:
    role = message.get("role") if isinstance(message, dict) else None
    if role == "developer" and not (roles.late_developer if index else roles.developer):
        role = "system"
    if role == "system" and index and not roles.late_system:
        return _reminder(message)
    return message if role is None or role == message["role"] else {**message, "role": role}


def _reminder(message: Message) -> Message:
    content = message.get("content")
    if isinstance(content, str):
        content = f"{_OPEN}{content}{_CLOSE}"
    elif isinstance(content, list):
        content = [_text(_OPEN), *content, _text(_CLOSE)]
    return {**message, "role": "user", "content": content}


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def holds_instructions(raw: bytes) -> bool:
    """Return False if a chat request's body surely has none that :func:`written_for` changes."""
    first = 1 if _BEGINS.search(raw) else 0
    return b'"developer"' in raw or raw.count(b'"system"') > first


def strictest(roles: Sequence[TemplateRoles]) -> TemplateRoles:
    """Return the roles that all templates show."""
    found = TemplateRoles()
    for each in roles:
        found &= each
    return found
