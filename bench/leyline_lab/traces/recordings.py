"""Reads recorded agent sessions (``.jsonl`` or ``.jsonl.gz``, one session per line).

Three shapes are supported, distinguished by their members:

- append-only: ``messages`` and ``calls``; request *i* is the first ``calls[i].n`` messages;
- edited: ``pool`` and ``requests``; request *k* is ``[pool[i] for i in requests[k]]``;
- captured: like edited, with ``tool_sets[tool_set_of_request[k]]`` in place of ``tools`` and an
  ``api``. Only chat completions can be replayed; a session of another API is skipped by name.
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from ..errors import TraceError

Message = dict[str, Any]
Tool = dict[str, Any]

CHAT_API = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request as its client sent it: the whole conversation so far, and the tools."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()


@dataclass(frozen=True, slots=True)
class RecordedSession:
    """The requests of one agent session, in order."""

    id: str
    requests: tuple[TraceRequest, ...]
    source: str = ""
    license: str = ""
    kind: str = ""
    model: str = ""


@dataclass(frozen=True, slots=True)
class Trace:
    """The sessions of a file, and one line for each session that cannot be replayed."""

    sessions: tuple[RecordedSession, ...]
    skipped: tuple[str, ...] = ()

    @property
    def requests(self) -> int:
        """Number of requests in all sessions."""
        return sum(len(session.requests) for session in self.sessions)

    def first(self, limit: int | None) -> Trace:
        """Return the first ``limit`` requests of the file, sessions in order; None for all."""
        if limit is None:
            return self
        kept: list[RecordedSession] = []
        left = limit
        for session in self.sessions:
            if left <= 0:
                break
            kept.append(_shortened(session, left))
            left -= len(session.requests)
        return Trace(tuple(kept), self.skipped)


def read_trace(path: Path) -> Trace:
    """Read a recording.

    Raises:
        TraceError: no such file, not gzip or UTF-8, a line of another shape, no session at all.
    """
    try:
        with _open(path) as lines:
            return read_sessions(lines, name=path.name)
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise TraceError(f"cannot read {path}: {error}") from error


def read_sessions(lines: IO[str], *, name: str) -> Trace:
    """Read a recording from an open text stream; ``name`` is for the errors."""
    sessions: list[RecordedSession] = []
    skipped: list[str] = []
    for number, line in _numbered(lines):
        where = f"{name}, line {number}"
        record = _decode(line, where)
        api = record.get("api", CHAT_API)
        if api != CHAT_API:
            skipped.append(f"{where}: session {record.get('id')!r} speaks {api}, not {CHAT_API}")
            continue
        sessions.append(_session(record, where))
    if not sessions:
        raise TraceError("; ".join(skipped) or f"{name} holds no session")
    return Trace(tuple(sessions), tuple(skipped))


def _open(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return io.TextIOWrapper(gzip.open(path, "rb"), encoding="utf-8")
    return path.open(encoding="utf-8")


def _numbered(lines: IO[str]) -> Iterator[tuple[int, str]]:
    return ((number, line) for number, line in enumerate(lines, start=1) if line.strip())


def _decode(line: str, where: str) -> Mapping[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise TraceError(f"{where}: not JSON ({error.msg} at column {error.colno})") from error
    if not isinstance(record, dict):
        raise TraceError(f"{where}: a session is a JSON object")
    return record


def _session(record: Mapping[str, Any], where: str) -> RecordedSession:
    if "pool" in record:
        requests = _pooled(record, where)
    elif "messages" in record:
        requests = _appended(record, where)
    else:
        raise TraceError(f"{where}: neither 'messages' with 'calls' nor 'pool' with 'requests'")
    if not requests:
        raise TraceError(f"{where}: the session makes no request")
    named = {key: str(record.get(key) or "") for key in ("source", "license", "kind", "model")}
    return RecordedSession(id=str(record.get("id") or where), requests=requests, **named)


def _appended(record: Mapping[str, Any], where: str) -> tuple[TraceRequest, ...]:
    messages = _objects(record.get("messages"), f"{where}: messages")
    tools = _objects(record.get("tools") or [], f"{where}: tools")
    requests = []
    for index, call in enumerate(_objects(record.get("calls"), f"{where}: calls")):
        count = _index(call.get("n"), len(messages) + 1, f"{where}: calls[{index}].n")
        if count == 0:
            raise TraceError(f"{where}: calls[{index}].n: a request has at least one message")
        requests.append(TraceRequest(messages[:count], tools))
    return tuple(requests)


def _pooled(record: Mapping[str, Any], where: str) -> tuple[TraceRequest, ...]:
    pool = _objects(record["pool"], f"{where}: pool")
    rows = _list(record.get("requests"), f"{where}: requests")
    requests = []
    for number, row in enumerate(rows):
        label = f"{where}: requests[{number}]"
        picked = [_index(item, len(pool), label) for item in _list(row, label)]
        if not picked:
            raise TraceError(f"{label}: a request has at least one message")
        messages = tuple(pool[item] for item in picked)
        requests.append(TraceRequest(messages, _tools_of(record, number, where)))
    return tuple(requests)


def _tools_of(record: Mapping[str, Any], number: int, where: str) -> tuple[Tool, ...]:
    if "tool_sets" not in record:
        return _objects(record.get("tools") or [], f"{where}: tools")
    sets = _list(record["tool_sets"], f"{where}: tool_sets")
    chosen = _list(record.get("tool_set_of_request"), f"{where}: tool_set_of_request")
    label = f"{where}: tool_set_of_request[{number}]"
    if number >= len(chosen):
        raise TraceError(f"{label}: missing")
    return _objects(sets[_index(chosen[number], len(sets), label)] or [], label)


def _objects(value: object, label: str) -> tuple[dict[str, Any], ...]:
    items = _list(value, label)
    for index, item in enumerate(items):
        if not isinstance(item, dict):
            raise TraceError(f"{label}[{index}]: not a JSON object")
    return tuple(items)


def _list(value: object, label: str) -> Sequence[Any]:
    if not isinstance(value, list):
        raise TraceError(f"{label}: not a JSON array")
    return value


def _index(value: object, end: int, label: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < end:
        raise TraceError(f"{label}: {value!r} is not an index below {end}")
    return value


def _shortened(session: RecordedSession, count: int) -> RecordedSession:
    return RecordedSession(
        session.id,
        session.requests[:count],
        session.source,
        session.license,
        session.kind,
        session.model,
    )
