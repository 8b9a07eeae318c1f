"""Content that must be forgotten, whichever policy takes it out."""

from __future__ import annotations

import pytest

from leyline_engine.contract import Mode
from leyline_policies import Memo, PolicyError, load_pipeline
from leyline_proxy.edits.prepare import PolicySession, prepare
from leyline_proxy.edits.sensitive import sensitive_content, sensitive_rule
from leyline_proxy.model.messages import Message

KEY = "AKIAIOSFODNN7EXAMPLE"


def _talk(result: str) -> list[Message]:
    function = {"name": "cat", "arguments": "{}"}
    call = {"id": "c", "type": "function", "function": function}
    return [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": result},
    ]


@pytest.mark.parametrize(
    ("result", "mode"),
    [
        (f"{'x' * 300} key={KEY} {'y' * 300}", Mode.FORGET),
        (f"key={KEY} {'y' * 600}", Mode.AMORTIZE),
        ("z" * 700, Mode.AMORTIZE),
    ],
)
def test_shortening_a_key_away_is_a_forget(result: str, mode: Mode) -> None:
    """The same policy amortises where the key stays in sight, or there is none."""
    content = sensitive_content("detectors=[aws_key]")
    session = PolicySession(sensitive=sensitive_rule(content, Memo()))
    policies = load_pipeline("truncate_older_than:n=0,max_chars=120")
    prepared = prepare(_talk(result), policies, (), 0, session=session)
    assert [change.mode for change in prepared.sent[2].changes] == [mode]
    assert list(prepared.forget_marks) == ([2] if mode is Mode.FORGET else [])


def test_every_text_of_a_message_is_looked_at() -> None:
    """Arguments of calls too, and what is found is the secret alone."""
    content = sensitive_content("patterns=['hunter[0-9]']")
    assert content is not None
    call = {
        "id": "c",
        "type": "function",
        "function": {"name": "f", "arguments": '{"p":"hunter2"}'},
    }
    message = {"role": "assistant", "content": "I use hunter3.", "tool_calls": [call]}
    assert content.found_in(message) == {"hunter2", "hunter3"}
    assert content.found_in({"role": "user", "content": "nothing"}) == frozenset()


@pytest.mark.parametrize(
    "settings", ["detectors=[nothing]", "pattern=(", "when='tokens > 3',pattern=x", "pattern=x | y"]
)
def test_what_means_nothing_is_refused(settings: str) -> None:
    """It is refused at the start, with the reason."""
    with pytest.raises(PolicyError):
        sensitive_content(settings)


def test_without_settings_nothing_is_sensitive() -> None:
    """Nothing is searched either."""
    assert sensitive_rule(sensitive_content(""), Memo()) is None


def test_a_run_with_a_forgotten_message_has_no_address() -> None:
    """Removed messages become one part: if one of them is forgotten for what it holds, the part is
    neither kept nor named."""
    content = sensitive_content("detectors=[aws_key]")
    session = PolicySession(sensitive=sensitive_rule(content, Memo()))
    policies = load_pipeline("sliding_window:max_messages=3,recallable=true")
    more: list[Message] = [{"role": "user", "content": f"Go on with step {n}."} for n in range(3)]
    for secret in (KEY, "none"):
        talk = [*_talk(f"key={secret} {'y' * 600}"), *more]
        prepared = prepare(talk, policies, (), 0, session=session)
        assert not prepared.faults and prepared.dropped
        kept = [part for part in prepared.evicted if secret in part.text]
        assert bool(kept) == (secret != KEY)
        assert ("sha256:" in str(prepared.messages)) == (secret != KEY)
        assert bool(prepared.forget_marks) == (secret == KEY)
