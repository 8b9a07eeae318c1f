"""head_tail_clamp, case by case."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tool_talks import contents, sent, talk

from leyline_policies.builtin.head_tail_clamp import HeadTailClamp
from leyline_policies.context import Context, run

OVERHEAD = 800
"""More than the warning and the marks take."""


def _clamped(content: Any, **settings: Any) -> Any:
    return contents(sent(HeadTailClamp(**settings), talk(("bash", content))))[0]


def test_mini_swe_agent_prints_the_same() -> None:
    """The text is that of mini-swe-agent 2.4.6 after the return code, to the letter.

    The digest is of ``observation_template`` in its config/benchmarks/swebench.yaml, rendered by
    Jinja for this output and return code 0.
    """
    text = _clamped("a" * 6000 + "b" * 6001)
    printed = f"<returncode>0</returncode>\n{text}"
    digest = hashlib.sha256(printed.encode()).hexdigest()
    assert digest == "6ba5f9c3435def4031807f3573136a9f7eabc820016c0d00e943e5929a3225d3"


def test_head_and_tail_stay() -> None:
    """The first and last characters stay, and what is elided is counted."""
    text = _clamped("h" * 10 + "x" * 5000 + "t" * 20, max_chars=100, head_chars=10, tail_chars=20)
    assert text.startswith("<warning>\n")
    assert "<output_head>\nhhhhhhhhhh\n</output_head>" in text
    assert "\n5000 characters elided\n" in text
    assert text.endswith(f"<output_tail>\n{'t' * 20}\n</output_tail>")


def test_no_tail_is_no_tail() -> None:
    """With tail_chars=0 nothing of the end is left."""
    text = _clamped("h" * 10 + "x" * 5000, max_chars=100, head_chars=10, tail_chars=0)
    assert text.endswith("<output_tail>\n\n</output_tail>")


@given(st.integers(0, 3000), st.integers(0, 300), st.integers(0, 300))
def test_clamping_never_lengthens_and_is_final(size: int, head: int, tail: int) -> None:
    """A result gets shorter or stays, and a clamped one is never clamped again."""
    text = "".join(chr(97 + n % 26) for n in range(size))
    settings = {"max_chars": 600, "head_chars": head, "tail_chars": tail}
    once = _clamped(text, **settings)
    assert once == text or len(once) < len(text)
    assert _clamped(once, **settings) == once
    if size > 600 + OVERHEAD:
        assert once != text


def test_each_text_part_is_clamped_for_itself() -> None:
    """In a part list long texts are clamped; images and short texts stay."""
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 20_000}}
    long, short = {"type": "text", "text": "x" * 20_000}, {"type": "text", "text": "y"}
    after = _clamped([long, image, short])
    assert len(after[0]["text"]) < 11_000
    assert after[1:] == [image, short]


def test_only_named_tools_are_clamped() -> None:
    """With tools, results of other tools stay; so does the text of other messages."""
    messages = talk(("bash", "x" * 20_000), ("read", "y" * 20_000))
    messages[1] = {"role": "user", "content": "z" * 20_000}
    after = sent(HeadTailClamp(tools=("read",)), messages)
    assert [new is old for old, new in zip(messages, after, strict=True)] == [True] * 5 + [False]


def test_nothing_to_clamp_hands_the_list_on() -> None:
    """Without an overlong result the same list comes back."""
    messages = talk(("bash", "x" * 9_999))
    assert run(HeadTailClamp(), messages, 0, Context()) is messages


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"max_chars": 0}, "max_chars=0"),
        ({"head_chars": -1}, "head_chars=-1"),
        ({"max_chars": 100}, "head_chars=5000 and tail_chars=5000"),
        ({"tools": ()}, "tools"),
    ],
)
def test_unusable_settings_are_named(settings: dict[str, Any], said: str) -> None:
    """A setting that can't work is refused, by name."""
    with pytest.raises(ValueError, match=said):
        HeadTailClamp(**settings)
