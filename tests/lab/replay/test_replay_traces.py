"""Reading recorded sessions."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from leyline_lab.errors import TraceError
from leyline_lab.traces.recordings import read_trace

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {
    "role": "user",
    "content": [{"type": "text", "text": "Hello", "cache_control": {"type": "ephemeral"}}],
}
ANSWER = {"role": "assistant", "content": "Hello."}
TOOL = {"type": "function", "function": {"name": "bash"}}
APPENDED: dict[str, Any] = {
    "id": "a",
    "messages": [SYSTEM, USER, ANSWER, USER],
    "tools": [TOOL],
    "calls": [{"n": 2, "prompt_tokens": 9}, {"n": 4}],
}
EDITED: dict[str, Any] = {
    "id": "b",
    "license": "MIT",
    "pool": [SYSTEM, USER, ANSWER],
    "requests": [[0, 1], [0, 1, 2, 1], [0, 1]],
    "tools": None,
}
CAPTURED: dict[str, Any] = {
    "id": "c",
    "api": "/v1/chat/completions",
    "pool": [SYSTEM, USER],
    "requests": [[0, 1], [1]],
    "tool_sets": [[TOOL], []],
    "tool_set_of_request": [0, 1],
}


def write(path: Path, *records: object) -> Path:
    """Writes one record per line; strings go in as they are."""
    lines = [item if isinstance(item, str) else json.dumps(item) for item in records]
    data = ("\n".join(lines) + "\n").encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def test_reads_the_three_shapes(tmp_path: Path) -> None:
    """Append-only, edited and captured sessions become lists of requests, messages untouched."""
    trace = read_trace(write(tmp_path / "t.jsonl.gz", APPENDED, "", EDITED, CAPTURED))
    appended, edited, captured = trace.sessions
    assert [len(r.messages) for r in appended.requests] == [2, 4]
    assert appended.requests[1].messages[1] == USER
    assert appended.requests[0].tools == (TOOL,)
    assert [r.messages for r in edited.requests][2] == (SYSTEM, USER)
    assert edited.license == "MIT" and edited.requests[0].tools == ()
    assert [r.tools for r in captured.requests] == [(TOOL,), ()]
    assert trace.requests == 7


def test_plain_and_packed_files_read_alike(tmp_path: Path) -> None:
    """A .jsonl file gives what its .gz twin gives."""
    plain = read_trace(write(tmp_path / "t.jsonl", APPENDED))
    assert plain == read_trace(write(tmp_path / "t.jsonl.gz", APPENDED))


def test_limit_counts_requests_of_the_file(tmp_path: Path) -> None:
    """A limit takes whole sessions in order and cuts the one in which it is reached."""
    trace = read_trace(write(tmp_path / "t.jsonl", APPENDED, EDITED, CAPTURED))
    assert [len(s.requests) for s in trace.first(4).sessions] == [2, 2]
    assert [len(s.requests) for s in trace.first(2).sessions] == [2]
    assert trace.first(None) == trace


def test_another_api_is_skipped_by_name(tmp_path: Path) -> None:
    """A session of the Responses API is reported and left out; alone it is an error."""
    responses = {**CAPTURED, "id": "codex", "api": "/v1/responses"}
    trace = read_trace(write(tmp_path / "t.jsonl", responses, APPENDED))
    assert [s.id for s in trace.sessions] == ["a"]
    assert "line 1" in trace.skipped[0] and "/v1/responses" in trace.skipped[0]
    with pytest.raises(TraceError, match="'codex' speaks /v1/responses"):
        read_trace(write(tmp_path / "u.jsonl", responses))


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ("{", "line 2: not JSON"),
        ("[]", "line 2: a session is a JSON object"),
        ({"id": "x"}, "line 2: neither 'messages'"),
        ({**APPENDED, "calls": [{"n": 5}]}, r"line 2: calls\[0\].n: 5 is not an index below 5"),
        ({**APPENDED, "calls": [{"n": 0}]}, "at least one message"),
        ({**APPENDED, "calls": []}, "makes no request"),
        ({**APPENDED, "messages": ["hi"]}, r"messages\[0\]: not a JSON object"),
        ({**EDITED, "requests": [[0], [True]]}, r"requests\[1\]: True is not an index"),
        ({**EDITED, "requests": [[]]}, "at least one message"),
        ({**EDITED, "requests": {}}, "requests: not a JSON array"),
        ({**CAPTURED, "tool_set_of_request": [0]}, r"tool_set_of_request\[1\]: missing"),
    ],
)
def test_errors_name_the_line(tmp_path: Path, record: object, message: str) -> None:
    """A line of another shape is refused with its number and what is wrong."""
    with pytest.raises(TraceError, match=message):
        read_trace(write(tmp_path / "t.jsonl", APPENDED, record))


def test_unreadable_files(tmp_path: Path) -> None:
    """A missing file, a broken gzip and an empty file are errors of the same kind."""
    (tmp_path / "bad.jsonl.gz").write_bytes(b"not gzip")
    (tmp_path / "empty.jsonl").write_bytes(b"\n")
    for name in ("missing.jsonl", "bad.jsonl.gz"):
        with pytest.raises(TraceError, match="cannot read"):
            read_trace(tmp_path / name)
    with pytest.raises(TraceError, match="holds no session"):
        read_trace(tmp_path / "empty.jsonl")
