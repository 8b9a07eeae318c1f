"""Properties of every built-in policy, over generated and recorded conversations."""

from __future__ import annotations

import copy
import gzip
import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyline_policies import Message, Policy, load_pipeline, pair_calls, text_of

SPECS = (
    "keep_all",
    "truncate_older_than",
    "truncate_older_than:n=0,max_chars=0",
    "truncate_older_than:n=1,max_chars=70,tools=[bash]",
    "drop_failed_calls",
    r"redact:pattern='sk-\w+'",
    r"redact:pattern='(?i)error|\d{3}',roles=[tool;assistant;user]",
)
POLICIES = [load_pipeline(spec)[0] for spec in SPECS]

texts = st.one_of(
    st.text(max_size=30),
    st.sampled_from(["Error: no", '{"error": "x"}', "exit code: 1", "ok", "key sk-abc 123"]),
    st.builds(
        lambda text, times: text * times, st.text(min_size=1, max_size=20), st.integers(1, 40)
    ),
)
contents = st.one_of(
    texts,
    st.none(),
    st.lists(
        st.one_of(
            st.fixed_dictionaries({"type": st.just("text"), "text": texts}),
            st.just({"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}),
        ),
        max_size=3,
    ),
)


@st.composite
def turns(draw: st.DrawFn) -> list[Message]:
    """An assistant message with up to three calls, their results, now and then a user message."""
    count = draw(st.integers(0, 3))
    start = draw(st.integers(0, 6))  # ids are reused between turns, as some harnesses do
    asked: Message = {"role": "assistant", "content": draw(contents), "x_unknown": draw(texts)}
    if count:
        asked["tool_calls"] = [
            {
                "id": f"call_{start + index}",
                "type": "function",
                "function": {
                    "name": draw(st.sampled_from(["bash", "read"])),
                    "arguments": json.dumps({"cmd": draw(texts)}),
                },
            }
            for index in range(count)
        ]
    answered = draw(st.permutations(range(count)))
    results = [
        {"role": "tool", "tool_call_id": f"call_{start + index}", "content": draw(contents)}
        for index in answered
    ]
    follow_up = [{"role": "user", "content": draw(contents)}] if draw(st.booleans()) else []
    return [asked, *results, *follow_up]


conversations = st.builds(
    lambda system, user, rest: [
        {"role": "system", "content": system},
        {"role": "user", "content": user},
        *(message for turn in rest for message in turn),
    ],
    texts,
    contents,
    st.lists(turns(), max_size=6),
)


def _check(policy: Policy, messages: list[Message]) -> list[Message]:
    """Input unmutated, deterministic, idempotent, pairs whole, order and other messages kept."""
    before = copy.deepcopy(messages)
    after = policy.transform(messages, 4)
    assert messages == before
    assert policy.transform(messages, 9) == after
    assert policy.transform(copy.deepcopy(after), 4) == after
    assert messages == before
    _check_pairs(before, after)
    for role in ("system", "user"):
        old, new = ([m for m in ms if m["role"] == role] for ms in (before, after))
        assert len(old) == len(new)
        if policy.mode == "amortize":
            assert old == new
    return after


def _check_pairs(before: list[Message], after: list[Message]) -> None:
    """No call loses its result and no result its call; what was unanswered may stay so."""
    old, new = pair_calls(before), pair_calls(after)
    assert Counter(len(call.results) for call in new) <= Counter(len(call.results) for call in old)
    orphans_old = sum(m["role"] == "tool" for m in before) - sum(len(c.results) for c in old)
    orphans_new = sum(m["role"] == "tool" for m in after) - sum(len(c.results) for c in new)
    assert orphans_new == orphans_old


@pytest.mark.parametrize("policy", POLICIES, ids=SPECS)
@given(messages=conversations)
def test_policy_keeps_the_rules(policy: Policy, messages: list[Message]) -> None:
    """Every built-in policy keeps the rules of `Policy` on any conversation."""
    _check(policy, messages)


@given(messages=conversations)
def test_truncation_never_lengthens(messages: list[Message]) -> None:
    """Truncation keeps every message, its keys and its number of parts, and lengthens no text."""
    after = POLICIES[2].transform(messages, 0)
    for old, new in zip(messages, after, strict=True):
        assert old.keys() == new.keys()
        assert len(text_of(new)) <= len(text_of(old))
        if isinstance(old["content"], list):
            assert [part["type"] for part in old["content"]] == [p["type"] for p in new["content"]]


@given(messages=conversations)
def test_redaction_leaves_no_match(messages: list[Message]) -> None:
    """Nothing that a message says matches the pattern after redaction."""
    assert "sk-abc" not in json.dumps(POLICIES[5].transform(messages, 0))


@pytest.mark.parametrize(
    "file",
    [
        "sessions_mini_swe_deepseek.jsonl.gz",
        "sessions_openhands_codeact.jsonl.gz",
        "sessions_swe_agent.jsonl.gz",
        "sessions_tau2_bench.jsonl.gz",
        "sessions_tau_bench.jsonl.gz",
        "sessions_webvoyager.jsonl.gz",
    ],
)
def test_rules_hold_on_recorded_sessions(traces_dir: Path, file: str) -> None:
    """The same rules hold on real agent sessions."""
    with gzip.open(traces_dir / file, "rt", encoding="utf-8") as lines:
        sessions = [json.loads(line)["messages"] for line in lines]
    for messages in sessions:
        for policy in POLICIES:
            _check(policy, messages)


def test_recorded_sessions_get_shorter(traces_dir: Path) -> None:
    """On coding sessions truncation saves a third of the text, and failed calls are found."""
    path = traces_dir / "sessions_mini_swe_deepseek.jsonl.gz"
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        sessions = [json.loads(line)["messages"] for line in lines]

    def size(policy: Policy | None) -> int:
        sent = [policy.transform(each, 0) if policy else each for each in sessions]
        return len(json.dumps(sent))

    whole = size(None)
    assert size(POLICIES[1]) < 0.67 * whole
    assert size(POLICIES[4]) < 0.95 * whole
