"""The patterns of ``leyline bench reuse``: each has the shared content and the change it claims."""

from __future__ import annotations

from collections import Counter, defaultdict
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyline_lab.errors import TraceError
from leyline_lab.reuse.workload import (
    PATTERNS,
    Material,
    TextRequest,
    Workload,
    assembled,
    texts_of,
)
from leyline_lab.traces.texts import MAX_TOOLS, demo_material, recorded_material

material = cache(demo_material)


def written(pattern: str, requests: int = 12) -> list[TextRequest]:
    """The requests of a pattern over the demo's text."""
    return Workload(material(), requests).write(pattern)


def by_session(requests: list[TextRequest]) -> list[list[TextRequest]]:
    """Requests by session, in order."""
    found: dict[str, list[TextRequest]] = defaultdict(list)
    for request in requests:
        found[request.session].append(request)
    return list(found.values())


@given(pattern=st.sampled_from(list(PATTERNS)), requests=st.integers(4, 60))
def test_several_sessions_send_several_requests(pattern: str, requests: int) -> None:
    """The number of requests is the one asked for; each session has two to six."""
    found = written(pattern, requests)
    sizes = Counter(request.session for request in found)
    assert len(found) == requests
    assert len(sizes) >= 2
    assert min(sizes.values()) >= 2
    assert max(sizes.values()) <= 6
    assert found == written(pattern, requests)
    assert all(part for request in found for part in request.parts)


def test_headers_rotate_in_front_of_a_shared_region() -> None:
    """No two headers are equal, and the region makes up most of each prompt."""
    found = written("agent_meta")
    assert len({request.parts[0] for request in found}) == len(found)
    assert len({request.parts[1] for request in found}) == 1
    assert all(len(r.parts[1]) > 0.8 * sum(map(len, r.parts)) for r in found)
    assert len({len(request.parts[0]) for request in found}) > 2


def test_a_variable_lies_deep_in_a_shared_prompt() -> None:
    """Only the variable and the question differ, and the variable has a third before it."""
    found = written("sysvar")
    assert [len({r.parts[i] for r in found}) for i in range(4)] == [1, len(found), 1, len(found)]
    assert all(len(r.parts[0]) > sum(map(len, r.parts)) / 3 for r in found)


def test_a_compaction_keeps_the_later_messages() -> None:
    """In turn, a conversation grows, and a summary replaces the first half of its messages."""
    for session in by_session(written("compact")):
        for turn, (before, after) in enumerate(pairwise(session), start=1):
            if turn % 2 == 0:
                assert after.parts[:-1] == before.parts
                continue
            assert after.parts[0] == before.parts[0]
            assert "Summary" in after.parts[1]
            kept = after.parts[2:-1]
            assert 2 <= len(kept) < len(before.parts) - 1
            assert before.parts[-len(kept) :] == kept


def test_documents_change_places() -> None:
    """Each prompt has four of seven documents, in ever other orders."""
    found = [request.parts[1:5] for request in written("rerank")]
    assert {len(set(documents)) for documents in found} == {4}
    assert len({document for documents in found for document in documents}) == 7
    assert len(set(found)) > len(found) - 2


def test_schemas_change_places_or_one_changes() -> None:
    """In turn, one schema changes in its place, and all are shuffled."""
    found = [request.parts[:-2] for request in written("tool_variants")]
    for number, (before, after) in enumerate(pairwise(found), start=1):
        if number % 2:
            assert sum(one != other for one, other in zip(before, after, strict=True)) == 1
        else:
            assert sorted(before) == sorted(after)
            assert before != after


def test_a_clock_never_shows_the_same_time() -> None:
    """The clock comes first and changes, while a session's messages only grow."""
    found = written("clock")
    assert len({request.parts[0] for request in found}) == len(found)
    for session in by_session(found):
        for before, after in pairwise(session):
            assert after.parts[1:-1] == before.parts[1:]


def test_prompts_are_their_parts_tokens() -> None:
    """A part is tokenised once, by itself, so that nothing before it changes its tokens."""
    requests = written("rerank")
    texts = texts_of(requests)
    assert len(texts) == len(set(texts))
    tokens = assembled(requests, {text: list(text.encode()) for text in texts})
    decoded = [bytes(request.tokens.tolist()).decode() for request in tokens]
    assert decoded == ["".join(request.parts) for request in requests]


def test_material_is_recorded_text_and_tools(traces_dir: Path) -> None:
    """The demo's session has three tools, which others fill up; recordings have enough."""
    recorded = recorded_material(traces_dir)
    assert len(recorded.tools) == len(material().tools) == MAX_TOOLS
    assert len(recorded.text) > 200_000
    assert len(material().text) > 40_000


def test_bad_material_is_refused(tmp_path: Path) -> None:
    """A folder without recordings, and too little text or tools, are errors that say so."""
    with pytest.raises(TraceError, match="no recordings"):
        recorded_material(tmp_path)
    with pytest.raises(ValueError, match="too few"):
        Workload(Material("short", material().tools), 4)
    with pytest.raises(ValueError, match="two tools"):
        Workload(Material(material().text, ()), 4)
