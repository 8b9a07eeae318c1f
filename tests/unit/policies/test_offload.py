"""offload: oversized results leave the prompt and can be recalled."""

from __future__ import annotations

import pytest
from tool_talks import asks, call, result, sent, talk

from leyline_policies import SpecError, load_pipeline
from leyline_policies.builtin.offload import Offload
from leyline_policies.context import Context, apply
from leyline_policies.recall import address_of, evicted_by, stubs_in

POLICY = Offload(max_chars=1_000, preview_chars=20)
TEXT = "a" * 500 + "b" * 600
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def test_a_large_result_becomes_a_preview_and_an_address() -> None:
    """It does so at once, and the text is found under the address."""
    messages = talk(("bash", TEXT), ("bash", "short"))
    after = sent(POLICY, messages)
    (part,) = evicted_by(after[3])
    assert after[3]["content"] == (
        "[Tool output too large (1,100 chars); its text can be recalled by address:]\n"
        f"[evicted: bash output, 278 tokens, {address_of(TEXT)}]\n"
        "aaaaaaaaaa\n...[1,080 chars omitted]...\nbbbbbbbbbb"
    )
    assert (part.text, part.policy, part.role, part.tool) == (TEXT, "offload", "tool", "bash")
    assert after[5] is messages[5]
    assert sent(Offload(max_chars=1_101, preview_chars=20), messages) is messages


def test_a_very_large_one_has_several_addresses() -> None:
    """The pieces are the text, in order, and each stub says which it is."""
    policy = Offload(max_chars=1_000, preview_chars=20, part_chars=400)
    text = "".join(map(str, range(600)))
    message = sent(policy, talk(("search/code", text)))[3]
    parts = evicted_by(message)
    assert [stub.address for stub in stubs_in(message["content"])] == [p.address for p in parts]
    assert "".join(part.text for part in parts) == text
    assert [stub.what for stub in stubs_in(message["content"])] == [
        f"search/code:{number}/5 output" for number in range(1, 6)
    ]
    huge = sent(policy, talk(("t" * 80, text * 60)))[3]
    assert len(evicted_by(huge)) == 16
    assert stubs_in(huge["content"])[-1].what.endswith(":16/16 output")


def test_pictures_stay() -> None:
    """Of a part list, only the texts are replaced, by one."""
    parts = [{"type": "text", "text": TEXT[:500]}, PICTURE, {"type": "text", "text": TEXT[500:]}]
    content = sent(POLICY, talk(("bash", parts)))[3]["content"]
    assert [part["type"] for part in content] == ["text", "image_url"]
    assert address_of(TEXT) in content[0]["text"]


def test_tools_can_be_chosen() -> None:
    """Others stay, and so does what was recalled; a text that wouldn't get shorter, too."""
    messages = talk(("bash", TEXT), ("read", TEXT), ("leyline_recall", TEXT))
    assert [m["content"] == TEXT for m in sent(POLICY, messages)[3::2]] == [False, False, True]
    only = Offload(max_chars=1_000, preview_chars=20, tools=("read",))
    assert [m["content"] == TEXT for m in sent(only, messages)[3::2]] == [True, False, True]
    short = talk(("bash", "x" * 60))
    assert sent(Offload(max_chars=50, preview_chars=20), short) is short


def test_recallable_adds_no_second_address() -> None:
    """The setting changes nothing, for what goes has its address already."""
    for more in ("", ",part_chars=300"):
        spec = f"offload:max_chars=1000,preview_chars=20{more}"
        (plain,) = load_pipeline(spec)
        (recallable,) = load_pipeline(f"{spec},recallable=true")
        messages = talk(("bash", TEXT))
        assert apply(recallable, messages, 0, Context()) == sent(plain, messages)


def test_a_result_without_a_call_is_known_by_its_name() -> None:
    """And one without any name as a tool's."""
    messages = [asks(call("c")), result("lost", TEXT, name="grep"), result("gone", TEXT)]
    whats = [stubs_in(m["content"])[0].what for m in sent(POLICY, messages)[1:]]
    assert whats == ["grep output", "tool output"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ("max_chars=0", "max_chars=0"),
        ("part_chars=0", "part_chars=0"),
        ("preview_chars=-1", "preview_chars=-1"),
        ("preview_chars=10000", "less than max_chars=10000"),
        ("tools=[]", "tools"),
    ],
)
def test_bad_settings_are_refused(settings: str, words: str) -> None:
    """The message names the setting and what is wrong with it."""
    with pytest.raises(SpecError, match=words):
        load_pipeline(f"offload:{settings}")
