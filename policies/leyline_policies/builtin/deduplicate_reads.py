"""The policy that keeps the newest reading of each file."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from leyline_policies.builtin.arguments import arguments_of, canonical
from leyline_policies.builtin.old_results import ClearedResults
from leyline_policies.context import Context
from leyline_policies.conversation import ToolCall
from leyline_policies.policy import Message

_TOOLS = (
    "read_file",
    "read",
    "Read",
    "view",
    "view_file",
    "open_file",
    "cat",
    "str_replace_editor",
    "str_replace_based_edit_tool",
)
_PATH_KEYS = ("path", "file_path", "filePath", "filename", "file", "target_file")
_COMMAND = "command"
_WHOLE = ""


@dataclass(frozen=True, slots=True)
class _Read:
    """A file and the part of it that was read: the other arguments, or none for the whole."""

    path: str
    part: str


@dataclass(slots=True)
class _Seen:
    """Results of the readings of each file, by part, and of those that newer ones replace."""

    standing: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    superseded: list[int] = field(default_factory=list)

    def add(self, read: _Read, results: Sequence[int], failed: bool) -> None:
        """Add a reading; one that failed replaces none."""
        parts = self.standing.setdefault(read.path, {})
        if not failed:
            for part in [*parts] if read.part == _WHOLE else [read.part]:
                self.superseded += parts.pop(part, ())
        parts.setdefault(read.part, []).extend(results)


@dataclass(frozen=True, slots=True)
class DeduplicateReads(ClearedResults):
    """Keep only the newest of several readings of a file; earlier ones become ``placeholder``.

    A reading is a call of one of ``tools`` whose argument under one of ``path_keys`` is a path. A
    tool with an argument ``command`` reads only if that is one of ``commands``. A reading of a part
    of the file, which its further arguments name, gives way to one of the same part or of the
    whole; arguments in ``ignore_keys`` name no part.

    After pydantic-ai-harness 0.62 (``DeduplicateFileReads``), which leaves the identity of a file
    to a function. Unlike there a reading that failed replaces none (`leyline_policies.failures`).
    """

    name: ClassVar[str] = "deduplicate_reads"
    cause: ClassVar[str | None] = "superseded"

    tools: tuple[str, ...] = _TOOLS
    path_keys: tuple[str, ...] = _PATH_KEYS
    commands: tuple[str, ...] = ("view", "read")
    ignore_keys: tuple[str, ...] = ("explanation", "description", "security_risk")
    placeholder: str = "[superseded file read]"

    def __post_init__(self) -> None:
        """Raise ValueError for empty ``tools`` or ``path_keys``."""
        for key, value in (("tools", self.tools), ("path_keys", self.path_keys)):
            if not value:
                raise ValueError(f"{key}=[] names none, so nothing would be a reading; name some")

    def _places(self, messages: list[Message], context: Context) -> Sequence[int]:
        failed = context.failed(messages)
        asked = context.each(messages, self._asked, "asked")

        def see(seen: _Seen, call: ToolCall) -> None:
            if call.results and call.name in self.tools:
                read = asked[call.message].get(call.position)
                if read is not None:
                    seen.add(read, call.results, any(failed[i] for i in call.results))

        return context.fold(context.calls(messages), see, _Seen, asked, failed).superseded

    def _asked(self, message: Message) -> Mapping[int | None, _Read | None]:
        asked = arguments_of(message)
        return {place: self._read(each) for place, each in asked.items()} if asked else asked

    def _read(self, asked: Any) -> _Read | None:
        if not isinstance(asked, dict):
            return None
        key = next((key for key in self.path_keys if isinstance(asked.get(key), str)), None)
        if key is None or asked.get(_COMMAND) not in (None, *self.commands):
            return None
        said = {key, _COMMAND, *self.ignore_keys}
        part = {name: each for name, each in asked.items() if name not in said and each is not None}
        return _Read(posixpath.normpath(asked[key]), canonical(part) if part else _WHOLE)
