"""redact, case by case."""

from __future__ import annotations

import json
from typing import Any

import pytest

from leyline_policies import Context, Message, SpecError, load_pipeline
from leyline_policies.builtin.redact import Redact

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
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,sk-abc"}}
    message = {
        "role": "assistant",
        "name": "sk-me",
        "content": [{"type": "text", "text": "key sk-abc."}, image],
        "reasoning_content": "use sk-abc",
        "refusal": "sk-abc",
        "x_unknown": {"deep": ["sk-abc", 1, None]},
    }
    assert _one(Redact(KEY), message) == {
        "role": "assistant",
        "name": "sk-me",
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
    """What any of them finds goes; what two of them find in part goes as one."""
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


ENDLESS = "(a|aa)+$"
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
    policy = Redact(ENDLESS, patterns=("sk-x",), on_timeout="withhold")
    context = Context()
    messages = [_says("sk-x"), hostile, _says("fine")]
    after = policy.transform(messages, 0, context)
    gone = {"type": "text", "text": "[redacted]"}
    assert after[0]["content"] == "[redacted]"
    assert after[1]["content"] == [gone, gone, hostile["content"][2]]
    assert after[1]["reasoning_content"] == "[redacted]"
    assert _arguments(after[1]) == '{"[redacted]": "[redacted]"}'
    assert after[1]["x_unknown"] == {"empty": "", "number": 1}
    assert after[1]["leyline"] == {"tags": ["kept"]}
    assert after[2] is messages[2]
    context.memo.next_turn()
    assert policy.transform(messages, 1, context)[1] is after[1]


def test_what_there_was_no_time_for_is_searched_on_the_next_turn() -> None:
    """Messages behind many that take too long are withheld too, but not for good."""
    policy = Redact(ENDLESS, on_timeout="withhold")
    messages = [*(_says(HOSTILE) for _ in range(6)), _says("fine")]
    context = Context()
    first = policy.transform(messages, 0, context)
    assert {message["content"] for message in first} == {"[redacted]"}
    context.memo.next_turn()
    assert policy.transform(messages, 1, context)[-1] is messages[-1]
