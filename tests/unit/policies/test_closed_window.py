"""closed_window: what SWE-agent's processor did, and what is ours."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from tool_talks import SYSTEM, USER, contents, sent, talk

from leyline_policies import Message
from leyline_policies.builtin.closed_window import ClosedWindow
from leyline_policies.context import Context, run

FIXTURE = json.loads(
    (Path(__file__).parents[2] / "fixtures" / "policies" / "swe_agent.json").read_text("utf-8")
)
CLOSED = "Outdated window with 2 lines omitted...\n"


def _view(file: str, note: str = "") -> str:
    return f"{note}[File: {file} (40 lines total)]\n1:a\n2:b\n(38 more lines below)"


def test_swe_agent_closes_the_same() -> None:
    """At every request, the views that SWE-agent closed are closed, with the same text."""
    (case,) = FIXTURE["closed_window"]
    history = [
        {"role": entry["role"], "content": entry["content"]}
        for entry in FIXTURE["histories"][case["history"]]
    ]
    assert any(prefix["changed"] for prefix in case["prefixes"])
    assert any(prefix["gone"] for prefix in case["prefixes"])  # ours keeps them
    for prefix in case["prefixes"]:
        messages: list[Message] = history[: prefix["length"]]
        expected = [
            {**message, "content": prefix["changed"].get(str(index), message["content"])}
            for index, message in enumerate(messages)
        ]
        assert sent(ClosedWindow(), messages) == expected


def test_newest_view_of_each_file_stays_open() -> None:
    """Older views of a file are closed in tool results too; its newest and other files stay."""
    messages = talk(("open", _view("a.py")), ("open", _view("b.py")), ("edit", _view("a.py")))
    after = contents(sent(ClosedWindow(), messages))
    assert after[0] == f"[File: a.py (40 lines total)]\n{CLOSED}(38 more lines below)"
    assert after[1:] == [_view("b.py"), _view("a.py")]


def test_edited_message_is_the_same_object_each_turn() -> None:
    """A closed view is the very same object on later turns."""
    context = Context()
    messages = talk(("open", _view("a.py")), ("edit", _view("a.py")), ("edit", _view("a.py")))
    first = run(ClosedWindow(), messages[:-2], 0, context)
    context.memo.next_turn()
    assert run(ClosedWindow(), messages, 1, context)[3] is first[3]


def test_nothing_superseded_hands_the_list_on() -> None:
    """Without a superseded view the same list comes back."""
    messages = talk(("open", _view("a.py")), ("open", _view("b.py")), ("bash", "1:x\n"))
    assert run(ClosedWindow(), messages, 0, Context()) is messages


def test_text_parts_count_for_themselves() -> None:
    """In a part list each text is a view of its own; other parts stay."""
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
    parts = [
        {"type": "text", "text": _view("a.py")},
        image,
        {"type": "text", "text": _view("b.py")},
    ]
    after = contents(sent(ClosedWindow(), talk(("open", parts), ("open", _view("a.py")))))
    assert CLOSED in after[0][0]["text"]
    assert after[0][1:] == parts[1:]


def test_later_part_replaces_an_earlier_one() -> None:
    """Of two views of a file in one part list, the later stays open."""
    parts = [{"type": "text", "text": _view("a.py", note)} for note in ("old ", "new ")]
    (after,) = contents(sent(ClosedWindow(), talk(("open", parts))))
    assert CLOSED in after[0]["text"]
    assert after[1] == parts[1]


def test_task_and_last_user_message_stay() -> None:
    """Neither the task nor the last user message is edited, whatever they show."""
    shown: Message = {"role": "user", "content": _view("a.py")}
    messages = [SYSTEM, shown, *talk(("open", "x"))[2:], shown, *talk(("open", _view("a.py")))[2:]]
    assert sent(ClosedWindow(), messages) == messages
    between = [*messages[:-2], {"role": "assistant", "content": "so"}, USER, *messages[-2:]]
    assert CLOSED in sent(ClosedWindow(), between)[4]["content"]


@given(st.text(alphabet="[File: a(1 lines total)]\n:0", max_size=200), st.integers(1, 3))
def test_whatever_the_text_nothing_but_lines_goes(text: str, times: int) -> None:
    """On any text, results keep their number and the newest stays as it is."""
    messages = talk(*[("open", text)] * times)
    after = contents(sent(ClosedWindow(), messages))
    assert after[-1] == text
    assert len(after) == times


def test_hostile_output_is_read_quickly() -> None:
    """Output made to be slow to search takes milliseconds, not minutes."""
    hostile: list[Any] = [
        "1:x\n[File:" + " " * 400_000,
        "1:x\n" + "[File: " * 60_000,
        "1:x\n[File: " + "a (1 lines" * 40_000,
        "1:x\n" + "[File: a\n" * 40_000,
        "1" * 400_000,
    ]
    began = time.thread_time()
    sent(ClosedWindow(), talk(*[("open", text) for text in hostile]))
    assert time.thread_time() - began < 2
