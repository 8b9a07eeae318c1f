"""tool_output_trimmer, case by case; the original runs beside it in the golden tests."""

from __future__ import annotations

from typing import Any

import pytest
from tool_talks import USER, asks, call, contents, result, sent, steps, talk

from leyline_policies import Message
from leyline_policies.builtin.tool_output_trimmer import ToolOutputTrimmer
from leyline_policies.context import Context, run

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 900}}


def _older(*results: tuple[str, Any]) -> list[Message]:
    """These results, and two turns after them."""
    answer = {"role": "assistant", "content": "done"}
    return [*talk(*results), answer, USER, answer, USER]


def _trimmed(content: Any, **settings: Any) -> Any:
    return contents(sent(ToolOutputTrimmer(**settings), _older(("bash", content))))[0]


def test_golden_preview() -> None:
    """A large output becomes a line with tool and length, and its beginning."""
    text = "ab" * 300
    assert _trimmed(text, preview_chars=6) == (
        "[Trimmed: bash output — 600 chars → 6 char preview]\nababab..."
    )


def test_recent_turns_stay() -> None:
    """Outputs after the last user messages but ``recent_turns`` stay, however large."""
    long = "x" * 900
    messages = [*talk(("bash", long)), USER, *steps(("bash", long), start=5), USER]
    assert [len(text) < 300 for text in contents(sent(ToolOutputTrimmer(), messages))] == [
        True,
        False,
    ]
    one = sent(ToolOutputTrimmer(recent_turns=1), messages)
    assert [len(text) < 300 for text in contents(one)] == [True, True]
    context = Context()
    assert run(ToolOutputTrimmer(recent_turns=4), messages, 0, context) is messages


def test_output_at_the_limit_stays() -> None:
    """An output of just ``max_output_chars`` characters stays, and so does one that would grow."""
    assert _trimmed("x" * 500) == "x" * 500
    assert _trimmed("x" * 501) != "x" * 501
    assert _trimmed("x" * 40, max_output_chars=30) == "x" * 40


def test_trimmable_tools_names_what_may_go() -> None:
    """With trimmable_tools outputs of other tools stay."""
    messages = _older(("bash", "x" * 900), ("read", "y" * 900))
    after = contents(sent(ToolOutputTrimmer(trimmable_tools=("read",)), messages))
    assert after[0] == "x" * 900
    assert after[1].startswith("[Trimmed: read output — 900 chars")


def test_images_are_counted_in_the_header() -> None:
    """A part list becomes one text that says which other parts went, within the limit."""
    parts = [{"type": "text", "text": "t" * 300}, IMAGE, IMAGE]
    after = _trimmed(parts, preview_chars=5)
    size = 300 + 2 * len(IMAGE["image_url"]["url"])
    assert after == f"[Trimmed: bash; payload {size}; preview 5; dropped 2 input_image]\nttttt..."


@pytest.mark.parametrize("limit", [1, 8, 9, 10, 15, 30, 45, 60, 80, 200])
def test_parts_always_fit_the_limit(limit: int) -> None:
    """The result of a part list fits any limit."""
    parts = [{"type": "text", "text": "t" * 300}, IMAGE, {"type": "file", "file": {"file_id": "f"}}]
    after = _trimmed(parts, max_output_chars=limit)
    assert len(after) <= limit
    assert after.startswith("[Trimmed]"[:limit].rstrip("]"))


def test_unknown_parts_stay_whole() -> None:
    """A list with a part of an unknown type isn't touched."""
    parts = [{"type": "text", "text": "t" * 900}, {"type": "hologram", "data": "x"}]
    assert _trimmed(parts) == parts
    assert _trimmed(["t" * 900]) == ["t" * 900]


def test_reused_id_names_the_call_before_the_result() -> None:
    """If ids are used again, the preview names the call that the output answers."""
    messages = [
        USER,
        *(asks(call("0", "read")), result("0", "x" * 900)),
        *(asks(call("0", "bash")), result("0", "y" * 900)),
        *(USER, USER),
    ]
    names = [text.split()[1] for text in contents(sent(ToolOutputTrimmer(), messages))]
    assert names == ["read", "bash"]


def test_output_without_a_call_is_of_an_unknown_tool() -> None:
    """A result whose call is gone, and that has no name, is trimmed as of an unknown tool."""
    messages = [USER, result("gone", "x" * 900), USER, USER]
    assert contents(sent(ToolOutputTrimmer(), messages))[0].startswith("[Trimmed: unknown_tool")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"recent_turns": 0}, "recent_turns=0"),
        ({"max_output_chars": 0}, "max_output_chars=0"),
        ({"preview_chars": -1}, "preview_chars=-1"),
        ({"trimmable_tools": ()}, "trimmable_tools"),
    ],
)
def test_unusable_settings_are_named(settings: dict[str, Any], said: str) -> None:
    """A setting that can't work is refused, by name."""
    with pytest.raises(ValueError, match=said):
        ToolOutputTrimmer(**settings)
