"""redact, case by case."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from leyline_policies import Context, Message, SpecError, load_pipeline
from leyline_policies.builtin.patterns import PatternTimeoutError
from leyline_policies.builtin.redact import Redact
from leyline_policies.builtin.texts import MAX_DEPTH

KEY = r"sk-\w+"


def _one(policy: Redact, message: Message) -> Message:
    (after,) = policy.transform([message], 0)
    return after


def _call(arguments: Any) -> Message:
    function = {"name": "sk-name", "arguments": arguments}
    call = {"id": "sk-1", "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def _arguments(message: Message) -> Any:
    return message["tool_calls"][0]["function"]["arguments"]


def test_every_text_is_searched() -> None:
    """Contents, parts, reasoning, refusals and unknown texts are redacted; structure stays."""
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,c2stYWJj"}}
    message = {
        "role": "assistant",
        "id": "sk-me",
        "content": [{"type": "text", "text": "key sk-abc."}, image],
        "reasoning_content": "use sk-abc",
        "refusal": "sk-abc",
        "x_unknown": {"deep": ["sk-abc", 1, None]},
    }
    assert _one(Redact(KEY), message) == {
        "role": "assistant",
        "id": "sk-me",
        "content": [{"type": "text", "text": "key [redacted]."}, image],
        "reasoning_content": "use [redacted]",
        "refusal": "[redacted]",
        "x_unknown": {"deep": ["[redacted]", 1, None]},
    }
    assert message["reasoning_content"] == "use sk-abc"


def test_address_of_a_picture_is_text() -> None:
    """A key inside a picture's web address is redacted."""
    part = {"type": "image_url", "image_url": {"url": "https://x/?key=sk-abc", "detail": "low"}}
    after = _one(Redact(KEY), {"role": "user", "content": [part]})
    assert after["content"][0]["image_url"] == {"url": "https://x/?key=[redacted]", "detail": "low"}


def test_roles_limit_the_search() -> None:
    """With roles, messages of other roles are left as they are."""
    messages: list[Message] = [{"role": r, "content": "sk-abc"} for r in ("system", "user", "tool")]
    after = Redact(KEY, roles=("tool", "system")).transform(messages, 0)
    assert [m["content"] for m in after] == ["[redacted]", "sk-abc", "[redacted]"]


@pytest.mark.parametrize(
    ("pattern", "arguments", "expected"),
    [
        (KEY, '{"cmd":  "login sk-abc"}', '{"cmd":  "login [redacted]"}'),
        (r"password=\S+", '{"cmd": "login password=abc"}', '{"cmd": "login [redacted]"}'),
        (r"a\nb", r'{"cmd": "xa\nby"}', '{"cmd": "x[redacted]y"}'),
        ("é+", r'{"cmd": "\u00e9!\ud800"}', r'{"cmd": "[redacted]!\ud800"}'),
        (r"\d{4}", '{"pin": 1234}', '{"[redacted]": "[redacted]"}'),
        (r"key\W+\w+", '{"key": "abc"}', '{"[redacted]": "[redacted]"}'),
        (r"1234", '{"pin": "1234", "n": 5}', '{"pin": "[redacted]", "n": 5}'),
        (KEY, "no json sk-abc", "no json [redacted]"),
        (KEY, {"cmd": "sk-abc", "name": "sk-b"}, {"cmd": "[redacted]", "name": "[redacted]"}),
    ],
)
def test_arguments_stay_json(pattern: str, arguments: Any, expected: Any) -> None:
    """Secrets in tool call arguments go, and what was JSON still is."""
    after = _one(Redact(pattern), _call(arguments))
    assert _arguments(after) == expected
    assert after["tool_calls"][0]["id"] == "sk-1"
    assert after["tool_calls"][0]["function"]["name"] == "sk-name"
    if isinstance(expected, str) and expected.startswith("{"):
        json.loads(expected)


def test_replacement_is_literal_and_not_redacted_again() -> None:
    """The replacement is no template, and a pattern that matches it leaves it alone."""
    once = _one(Redact(r"\w+", r"<\1 x>"), {"role": "user", "content": "ab cd"})
    assert once["content"] == r"<\1 x> <\1 x>"
    assert _one(Redact(r"\w+", r"<\1 x>"), once) == once


def test_writing_the_replacement_hides_nothing() -> None:
    """Text that already holds the replacement can't shield what surrounds it."""
    after = _one(Redact(r"\S+@\S+"), {"role": "user", "content": "[redacted]@example.org"})
    assert after["content"] == "[redacted]"


def test_pattern_stays_out_of_the_representation() -> None:
    """The pattern may itself be a secret: it is not printed with the policy."""
    assert "hunter2" not in repr(Redact("hunter2"))
    assert Redact("hunter2").mode == "forget"


def _says(text: str) -> Message:
    return {"role": "user", "content": text}


def test_patterns_and_detectors_join() -> None:
    """A find of any of them goes; overlapping finds of two go as one."""
    policy = Redact("a+b", patterns=("b+c", "x"), detectors=("email",))
    after = _one(policy, _says("aabbc x me@example.org y"))
    assert after["content"] == "[redacted] [redacted] [redacted] y"


def test_something_must_be_looked_for() -> None:
    """A redaction without pattern, patterns and detectors is refused, and so is an unknown one."""
    with pytest.raises(SpecError, match="pattern, patterns or detectors"):
        load_pipeline("redact")
    with pytest.raises(SpecError, match="did you mean 'email'"):
        load_pipeline("redact:detectors=[e_mail]")
    with pytest.raises(SpecError, match=r"pattern='\(' is no regular expression"):
        load_pipeline("redact:patterns=['(']")
    with pytest.raises(SpecError, match="on_timeout="):
        load_pipeline("redact:pattern=x,on_timeout=never")


def test_an_edit_is_made_once() -> None:
    """A message of an earlier turn is not searched again, and its edit is the same object."""
    context, messages = Context(), [_says("sk-abc"), _says("none")]
    first = Redact(KEY).transform(messages, 0, context)
    context.memo.next_turn()
    more = [*messages, _says("sk-abc")]
    second = Redact(KEY).transform(more, 1, context)
    assert [a is b for a, b in zip(first, second, strict=False)] == [True, True]
    assert second[1] is messages[1]
    assert Redact(KEY).transform([messages[1]], 0, context)[0] is messages[1]
    assert Redact(KEY).trusted


def test_a_message_with_members_called_like_settings() -> None:
    """No member of a message is mistaken for something else."""
    message = {"role": "user", "content": "sk-abc", "mode": "sk-abc", "stub": 1, "message": "x"}
    assert _one(Redact(KEY), message) == {
        **message,
        "content": "[redacted]",
        "mode": "[redacted]",
    }


ENDLESS = "(?=a)(a|aa)+$"
HOSTILE = "a" * 60 + "b"


def test_what_cannot_be_searched_in_time_is_withheld_if_wanted() -> None:
    """Every text of that message goes, its structure stays, and the others are searched."""
    hostile: Message = {
        "role": "assistant",
        "content": [
            {"type": "text", "text": HOSTILE},
            {"type": "image_url", "image_url": {"url": "https://x/?sk-abc"}},
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}},
        ],
        "reasoning_content": "secret",
        "tool_calls": _call('{"cmd": "secret"}')["tool_calls"],
        "x_unknown": {"empty": "", "number": 1},
        "leyline": {"tags": ["kept"]},
    }
    policy = Redact(ENDLESS, patterns=("sk-x",))
    context = Context()
    messages = [_says("sk-x"), hostile, _says("fine")]
    after = policy.transform(messages, 0, context)
    gone = {"type": "text", "text": "[redacted]"}
    assert after[0]["content"] == "[redacted]"
    assert after[1]["content"] == [gone, gone, hostile["content"][2]]
    assert after[1]["reasoning_content"] == "[redacted]"
    assert _arguments(after[1]) == '{"[redacted]": "[redacted]"}'
    assert after[1]["[redacted]"] == {"[redacted]": "", "[redacted]_2": "[redacted]"}
    assert after[1]["leyline"] == {"tags": ["kept"]}
    assert after[2] is messages[2]
    context.memo.next_turn()
    assert policy.transform(messages, 1, context)[1] is after[1]


def test_what_takes_too_long_costs_no_other_message_its_time() -> None:
    """The others are searched, however many are withheld, and the same is sent on every turn."""
    policy = Redact(ENDLESS, patterns=("sk-x",))
    messages = [*(_says(HOSTILE) for _ in range(6)), _says("fine"), _says("a sk-x")]
    context = Context()
    first = policy.transform(messages, 0, context)
    assert [m["content"] for m in first] == [*["[redacted]"] * 6, "fine", "a [redacted]"]
    context.memo.next_turn()
    assert policy.transform(messages, 1, context) == first
    assert policy.transform(messages[3:], 1, Context()) == first[3:]


def test_a_timeout_may_fail_the_policy() -> None:
    """If it is configured so, nothing is withheld, and no part of the result is used."""
    with pytest.raises(PatternTimeoutError):
        Redact(ENDLESS, on_timeout="fail").transform([_says("fine"), _says(HOSTILE)], 0)


TOKEN = "sk-ant-" + "api03-" + "aB3dE6gH9jK2mN5pQ8sT1vW4yZ7bC0eF"


@pytest.mark.parametrize(
    "written",
    [
        TOKEN,
        TOKEN.replace("-", "\\u002d"),
        TOKEN.replace("-", "\\\\u002D"),
        TOKEN.replace("-", r"\x2d"),
        rf"\n{TOKEN}",
        rf"\\n{TOKEN}\\n",
        json.dumps(json.dumps(f"\t{TOKEN}")),
        "".join(f"\\u{ord(letter):04x}" for letter in TOKEN),
    ],
)
@pytest.mark.parametrize(
    "place",
    [
        lambda text: {"role": "user", "content": text},
        lambda text: {"role": "user", "content": [{"type": "x_new", "body": {"deep": [text]}}]},
        lambda text: {"role": "user", "content": [{"type": "text", "text": text, text: text}]},
        lambda text: {"role": "user", "content": "x", "name": text},
        lambda text: {"role": "user", "content": "x", text: {text: {text: 1}}},
        lambda text: {"role": "user", "content": "x", "cache_control": {"type": "a", "x": text}},
        lambda text: {"role": "user", "content": [{"type": "file", "file": {"file_data": text}}]},
        lambda text: {"role": "assistant", "content": None, "reasoning_details": [{"text": text}]},
        lambda text: _call(f'{{"command": "login {text}"}}'),
        lambda text: _call({"command": {text: [text]}}),
        lambda text: _call(f"no json: {text}"),
    ],
)
def test_however_it_is_written_and_wherever_it_stands(
    place: Callable[[str], Message], written: str
) -> None:
    """No form of the key is left, nor its letters once escapes are undone, and it is done once."""
    after = _one(Redact(detectors=("keys",)), place(written))
    plain = json.dumps(after)
    for _ in range(4):
        assert "sk-ant" not in plain
        plain = re.sub(r"\\u00(..)", lambda each: chr(int(each[1], 16)), plain)
        plain = plain.replace("\\\\", "\\")
    assert TOKEN[-12:] not in str(after)
    assert _one(Redact(detectors=("keys",)), after) == after


def test_names_that_come_to_be_equal_are_told_apart() -> None:
    """No member is lost, and names that messages have by the API stay, whatever is looked for."""
    message = {"role": "user", "content": "x", "sk-a": 1, "sk-b": 2, "[redacted]": 3}
    assert _one(Redact(r"sk-\w"), message) == {
        "role": "user",
        "content": "x",
        "[redacted]_2": 1,
        "[redacted]_3": 2,
        "[redacted]": 3,
    }
    assert _one(Redact("content|text|role"), _says("a text")) == _says("a [redacted]")


def test_numbers_are_searched_as_they_are_written() -> None:
    """A card in an unknown object goes, and so does one among arguments; other numbers stay."""
    card = 4111111111111111
    message = {"role": "user", "content": "x", "form": {"card": card, "n": 5, "on": True, "f": 0.5}}
    policy = Redact(detectors=("credit_card",))
    edited = _one(policy, message)["form"]
    assert edited == {"card": "[redacted]", "n": 5, "on": True, "f": 0.5}
    assert str(card) not in str(_one(policy, _call(f'{{"card": {card}}}')))
    assert _one(Redact("x"), {"role": "user", "content": "", "n": 10**5000})["n"] == "[redacted]"


def test_a_match_may_reach_from_one_part_into_the_next() -> None:
    """Parts are one text to a model; the replacement is where the match begins."""
    texts = ["login ", TOKEN[:9], TOKEN[9:20], f"{TOKEN[20:]} now", "x"]
    parts = [{"type": "text", "text": text} for text in texts]
    parts.insert(2, {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}})
    after = _one(Redact(detectors=("keys",)), {"role": "tool", "content": parts})
    assert [part.get("text") for part in after["content"]] == [
        *("login ", "[redacted]", None, "", " now", "x")
    ]
    assert after["content"][2] is parts[2] or after["content"][2] == parts[2]


def test_an_escape_is_not_cut() -> None:
    """The n of an escaped line break is no letter of the word after it, and stays."""
    after = _one(Redact(detectors=("email",)), _says(r'{"to": "a\nme@example.org\nyou@x.org"}'))
    assert after["content"] == r'{"to": "a\n[redacted]\n[redacted]"}'
    assert _one(Redact(r"nme@\S+"), _says(r"a\nme@x"))["content"] == r"a[redacted]"


def test_what_is_nested_without_end_goes_as_one() -> None:
    """Text deeper than any request may reach is not searched, and not sent either."""
    deep: Any = "sk-abc"
    for _ in range(MAX_DEPTH + 2):
        deep = [deep]
    assert "sk-abc" not in str(_one(Redact(KEY), {"role": "user", "content": "", "x": deep}))
