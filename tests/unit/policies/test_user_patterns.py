"""Regular expressions from settings: what a hostile one can do."""

from __future__ import annotations

import threading
import time

import pytest

from leyline_policies import Message, PolicyError
from leyline_policies.builtin.drop_failed_calls import DropFailedCalls
from leyline_policies.builtin.patterns import (
    Budget,
    PatternTimeoutError,
    UserPattern,
    compile_pattern,
)
from leyline_policies.builtin.redact import Redact

ENDLESS = "(?=a)(a|aa)+$"
"""RE2 knows no lookahead, so `regex` matches it."""
TEXT = "a" * 60 + "b"


def test_a_transform_call_has_one_budget() -> None:
    """The policy gives up soon, and without the pattern, however many texts a conversation has."""
    messages: list[Message] = [{"role": "user", "content": TEXT} for _ in range(20)]
    begun = time.thread_time()
    with pytest.raises(PolicyError) as caught:
        Redact(ENDLESS, on_timeout="fail").transform(messages, 0)
    assert {m["content"] for m in Redact(ENDLESS).transform(messages, 0)} == {"[redacted]"}
    assert time.thread_time() - begun < 2
    assert isinstance(caught.value, PatternTimeoutError)
    assert ENDLESS not in str(caught.value)


def test_the_budget_is_used_up_across_matches() -> None:
    """Once it is spent, no further match is tried."""
    matcher = UserPattern(ENDLESS).matcher(Budget(0.05))
    assert matcher.found_in("aaa")
    for text in (TEXT, "aaa"):
        with pytest.raises(PatternTimeoutError):
            matcher.found_in(text)


def test_dropping_failed_calls_has_a_budget_too() -> None:
    """The pattern that recognises failures is the caller's as well."""
    function = {"name": "f", "arguments": "{}"}
    messages: list[Message] = [
        {"role": "user", "content": "go"},
        {
            "role": "assistant",
            "tool_calls": [{"id": "c", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "c", "content": TEXT},
    ]
    with pytest.raises(PatternTimeoutError):
        DropFailedCalls(ENDLESS).transform(messages, 0)


def test_other_threads_run_during_a_match() -> None:
    """A match that never ends doesn't hold the interpreter."""
    done = threading.Event()
    wakes = 0

    def watch() -> None:
        nonlocal wakes
        while not done.wait(0.005):
            wakes += 1

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with pytest.raises(PatternTimeoutError):
            UserPattern(ENDLESS).matcher(Budget(0.3)).found_in(TEXT)
    finally:
        done.set()
        watcher.join()
    assert wakes > 5


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("a{99999999}", "repeats too much"),
        ("(" * 40 + "a|b" + "|c){1,3}" * 40, "repeats too much"),
        ("(?!x)" + "(?:" * 40 + "ab" + ")+" * 40, "repeats too much"),
        ("(?:(?:(?:ab){1000}c){1000}d){1000}", "repeats too much"),
        ("(" * 5000 + ")" * 5000, "is no regular expression"),
        ("(?P<a>x)(?P<a>y)", "redefinition of group name"),
        (r"\p{L}+", "position 0"),
    ],
)
def test_patterns_that_blow_up_are_refused_at_once(pattern: str, words: str) -> None:
    """Compiling takes neither long nor much memory; what is refused is refused in words."""
    with pytest.raises(ValueError, match=words):
        compile_pattern(pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        r"(?:[0-9]{1,3}\.){3}[0-9]{1,3}",
        r"eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]{20,}",
        r"-----BEGIN [A-Z ]+-----(?:.|\n)+?-----END [A-Z ]+-----",
        r"(?i)(?:api|access|secret)[_-]?(?:key|token)\s*[:=]\s*['\"]?[A-Za-z0-9/+]{16,512}",
        r"(?x) sk- [a-f0-9]{64,}  # a key (of ours",
    ],
)
def test_patterns_of_real_secrets_pass(pattern: str) -> None:
    """The limits are far from what redaction needs."""
    assert Redact(pattern).transform([{"role": "user", "content": "no"}], 0)
