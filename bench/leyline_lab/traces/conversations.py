"""Reading of sessions for trials: recordings, and plain message lists or chat requests.

Besides the recordings that `.recordings` reads:

- ``.json``: a list of messages, or a chat request with ``messages``;
- ``.jsonl``: one such list or request per line, each a session of its own, or one message per line,
  together a session.

A plain conversation becomes one request for each answer in it.
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from leyline_policies.testing import requests_of
from leyline_proxy.model.messages import MessageError, check_messages

from ..errors import TraceError
from .recordings import RecordedSession, Trace, TraceRequest, read_sessions


def read_files(paths: Sequence[Path], limit: int | None = None) -> Trace:
    """Return the sessions of several files, in order; of each the first ``limit`` requests.

    Raises:
        TraceError: see :func:`read_conversations`.
    """
    traces = [read_conversations(path).first(limit) for path in paths]
    return Trace(
        tuple(session for trace in traces for session in trace.sessions),
        tuple(line for trace in traces for line in trace.skipped),
    )


def read_conversations(path: Path) -> Trace:
    """Return the sessions in a file, ``.gz`` or not.

    Raises:
        TraceError: no such file, or none of these shapes; names the line.
    """
    try:
        content = path.read_bytes()
        text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf-8")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise TraceError(f"cannot read {path}: {error}") from error
    try:
        found = [(_place(path), json.loads(text))]
    except ValueError:
        found = _lines(text, path.name)
    if not found:
        raise TraceError(f"{path.name} holds no session")
    if all(isinstance(value, dict) and "role" in value for _, value in found):
        found = [(path.name, [value for _, value in found])]
    if any(_is_recording(value) for _, value in found):
        return read_sessions(io.StringIO(_as_lines(found, text)), name=path.name)
    return Trace(tuple(_conversation(value, where) for where, value in found))


def _place(path: Path) -> str:
    """Return the place of a file's only document."""
    return f"{path.name}, line 1" if ".jsonl" in path.suffixes else path.name


def _lines(text: str, name: str) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for number, line in enumerate(io.StringIO(text), start=1):
        if line.strip():
            where = f"{name}, line {number}"
            try:
                found.append((where, json.loads(line)))
            except ValueError as error:
                raise TraceError(f"{where}: not JSON ({error})") from error
    return found


def _is_recording(value: Any) -> bool:
    return isinstance(value, dict) and ("calls" in value or "pool" in value or "api" in value)


def _as_lines(found: Sequence[tuple[str, Any]], text: str) -> str:
    """Return the text in the form for the reader of recordings: a session per line."""
    return json.dumps(found[0][1]) if len(found) == 1 else text


def _conversation(value: Any, where: str) -> RecordedSession:
    messages = value.get("messages") if isinstance(value, dict) else value
    tools = value.get("tools") if isinstance(value, dict) else None
    try:
        checked = check_messages(messages)
    except MessageError as error:
        raise TraceError(f"{where}: {error}") from error
    given = tuple(tools) if isinstance(tools, list) else ()
    requests = [TraceRequest(tuple(each), given) for each in requests_of(checked)]
    return RecordedSession(where, tuple(requests))
