"""drop_images, case by case."""

from __future__ import annotations

from typing import Any

import pytest
from tool_talks import asks, call, result, sent

from leyline_policies import Message, SpecError, load_pipeline
from leyline_policies.builtin.drop_images import DropImages

DATA = "data:image/png;base64," + "A" * 4096
WORDS = {"type": "text", "text": "see"}


def _image(address: str = "https://example.org/a.png") -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": address}}


def _shows(*parts: Any, role: str = "user") -> Message:
    return {"role": role, "content": list(parts)}


def _texts(messages: list[Message]) -> list[list[str]]:
    return [[part.get("text", "image") for part in message["content"]] for message in messages]


def test_by_default_no_picture_is_left() -> None:
    """Pictures of users and tool results become a line of text, text parts stay."""
    calls = asks(call("1"), content=[WORDS])
    messages = [_shows(WORDS, _image()), calls, result("1", [_image(DATA), WORDS])]
    after = sent(DropImages(), messages)
    assert _texts(after) == [
        ["see", "[image removed]"],
        ["see"],
        ["[image removed: image/png, 3 KiB]", "see"],
    ]
    assert after[0]["content"][0] is WORDS


def test_newest_pictures_stay() -> None:
    """The newest ``keep_last`` pictures are counted over messages and within one."""
    messages = [_shows(_image(), _image()), _shows(_image(), WORDS)]
    gone = "[image removed]"
    assert _texts(sent(DropImages(1), messages)) == [[gone, gone], ["image", "see"]]
    assert _texts(sent(DropImages(2), messages)) == [[gone, "image"], ["image", "see"]]
    assert sent(DropImages(3), messages) == messages


def test_the_assistants_pictures_stay() -> None:
    """Pictures from the model or the instructions are neither counted nor replaced."""
    messages = [_shows(_image(), role="system"), _shows(_image(), role="assistant")]
    assert sent(DropImages(), messages) == messages


@pytest.mark.parametrize(
    ("part", "text"),
    [
        ({"type": "input_image", "image_url": DATA}, "[image removed: image/png, 3 KiB]"),
        ({"type": "image", "source": {"data": "AAAA"}}, "[image removed]"),
        (_image("data:,x"), "[image removed: data, 1 KiB]"),
        ({"type": "image_url"}, "[image removed]"),
    ],
)
def test_every_form_of_picture_goes(part: dict[str, Any], text: str) -> None:
    """The stub is a text part of the same API, and says size and type of data only."""
    marked = {**part, "cache_control": {"type": "ephemeral"}}
    (after,) = sent(DropImages(), [_shows(marked)])
    kind = "input_text" if part["type"] == "input_image" else "text"
    expected = {"type": kind, "text": text, "cache_control": {"type": "ephemeral"}}
    assert after["content"] == [expected]


def test_a_negative_number_is_refused() -> None:
    """The message names the setting."""
    with pytest.raises(SpecError, match="keep_last=-1"):
        load_pipeline("drop_images:keep_last=-1")
