"""The test kit: it passes policies that keep the rules and catches each way to break one."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import pytest

from leyline_policies import Context, Message, Mode, drop, edit, load_pipeline, map_text, verbs
from leyline_policies.context import MAX_STATE_BYTES
from leyline_policies.conversation import pair_calls
from leyline_policies.testing import (
    RULES,
    NothingEditedWarning,
    RuleBrokenError,
    check_policy,
    requests_of,
    synthetic_sessions,
)

TALK: list[Message] = [
    {"role": "system", "content": "You help."},
    {"role": "user", "content": "Look."},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "bash", "arguments": "{}"}}
        ],
    },
    {"role": "tool", "tool_call_id": "a", "content": "x" * 50},
    {"role": "assistant", "content": "Done."},
    {"role": "user", "content": "Thanks."},
    {"role": "assistant", "content": "Bye."},
    {"role": "user", "content": "Bye."},
]
SESSIONS = [requests_of(TALK)]

Do = Callable[["Policy", list[Message], int, Context], Any]

_STUB = f"[evicted: bash output, 9 tokens, sha256:{'0' * 32}]"


@dataclass
class Policy:
    """A policy that does what it is given."""

    do: Do
    mode: Mode = "amortize"
    memory: dict[str, Any] = field(default_factory=dict)
    name: str = "broken"
    forgets: bool = False

    def transform(self, messages: list[Message], turn_idx: int, context: Context) -> Any:
        """Do it."""
        return self.do(self, messages, turn_idx, context)


def _raises(self: Policy, messages: list[Message], turn: int, context: Context) -> Any:
    return messages if turn < 2 else messages[99]


def _mutates(self: Policy, messages: list[Message], turn: int, context: Context) -> Any:
    if turn == 1:
        messages[2]["tool_calls"][0]["function"]["name"] = "other"
    return messages


def _mutates_list(self: Policy, messages: list[Message], turn: int, context: Context) -> Any:
    messages.append({"role": "user", "content": "more"})
    return messages[:-1]


def _counts_calls(self: Policy, messages: list[Message], turn: int, context: Context) -> Any:
    self.memory["calls"] = self.memory.get("calls", 0) + 1
    return [edit(messages[0], name=f"n{self.memory['calls']}"), *messages[1:]]


def _counts_in_state(self: Policy, messages: list[Message], turn: int, context: Context) -> Any:
    context.state["calls"] = context.state.get("calls", 0) + 1
    return [edit(messages[0], name=f"n{context.state['calls']}"), *messages[1:]]


def _secret_state(self: Policy, messages: list[Message], turn: int, context: Context) -> Any:
    self.memory["calls"] = self.memory.get("calls", 0) + 1
    context.state["calls"] = self.memory["calls"]
    return messages


def _remembers_sessions(self: Policy, messages: list[Message], turn: int, context: Context) -> Any:
    """Acts in the first session that it sees only."""
    self.memory.setdefault("last", turn)
    if turn < self.memory["last"]:
        self.memory["again"] = True
    self.memory["last"] = turn
    if turn == 1 and "again" not in self.memory:
        return [edit(messages[0], name="first"), *messages[1:]]
    return messages


def _state(value: Any) -> Do:
    def do(self: Policy, messages: list[Message], turn: int, context: Context) -> Any:
        context.state["value"] = value
        return messages

    return do


def _note(self: Policy, messages: list[Message], turn: int, context: Context) -> Any:
    context.note("shouted", text="hello")  # type: ignore[arg-type]
    return messages


def _returns(make: Callable[[list[Message]], Any]) -> Do:
    return lambda self, messages, turn, context: make(messages)


BROKEN: list[tuple[str, str, Policy, int, int | None]] = [
    ("raises", "no_exception", Policy(_raises), 2, None),
    ("no list", "returns_messages", Policy(_returns(tuple)), 0, None),
    ("nothing", "returns_messages", Policy(_returns(lambda m: None)), 0, None),
    ("no message", "returns_messages", Policy(_returns(lambda m: [*m, "x"])), 0, 2),
    ("no role", "returns_messages", Policy(_returns(lambda m: [*m, {"content": ""}])), 0, 2),
    ("no JSON", "returns_messages", Policy(_returns(lambda m: [edit(m[0], x={1}), *m[1:]])), 0, 0),
    ("mutates", "input_kept", Policy(_mutates), 1, 2),
    ("mutates the list", "input_kept", Policy(_mutates_list), 0, None),
    (
        "forgets without a word",
        "forgets_said",
        Policy(_returns(lambda m: [edit(m[0], content="x", mode="forget"), *m[1:]])),
        0,
        0,
    ),
    (
        "says forget without a word",
        "forgets_said",
        Policy(_returns(lambda m: [m[0], verbs.forget(m[1]), *m[2:]])),
        0,
        1,
    ),
    (
        "shows the address of no text",
        "stubs_found",
        Policy(_returns(lambda m: [m[0], edit(m[1], content=_STUB), *m[2:]])),
        0,
        1,
    ),
    (
        "loses a result",
        "pairs_whole",
        Policy(_returns(lambda m: [x for x in m if x["role"] != "tool"])),
        1,
        2,
    ),
    (
        "loses a call",
        "pairs_whole",
        Policy(_returns(lambda m: [x for x in m if "tool_calls" not in x])),
        1,
        2,
    ),
    ("drops the system", "system_kept", Policy(_returns(lambda m: [drop(m[0]), *m[1:]])), 0, 0),
    (
        "edits the system",
        "system_kept",
        Policy(_returns(lambda m: [{**m[0], "content": ""}, *m[1:]])),
        0,
        0,
    ),
    (
        "drops the last user",
        "last_user_kept",
        Policy(_returns(lambda m: m[:-1] if m[-1]["content"] == "Thanks." else m)),
        2,
        5,
    ),
    (
        "copies",
        "same_objects",
        Policy(_returns(lambda m: [*m[:-1], dict(m[-1])])),
        0,
        1,
    ),
    ("edits to the same", "same_objects", Policy(_returns(lambda m: [edit(m[0]), *m[1:]])), 0, 0),
    ("a set as state", "state_json", Policy(_state({1, 2})), 0, None),
    ("numbers as keys", "state_json", Policy(_state({1: 2})), 0, None),
    ("no number as state", "state_json", Policy(_state(float("nan"))), 0, None),
    ("large state", "state_json", Policy(_state("x" * MAX_STATE_BYTES)), 0, None),
    ("text as note", "notes_numbers", Policy(_note), 0, None),
    ("counts its calls", "idempotent", Policy(_counts_calls, "forget"), 0, 0),
    ("counts in its state", "idempotent", Policy(_counts_in_state, "forget"), 0, 0),
    ("hides a counter", "idempotent", Policy(_secret_state), 0, None),
    ("knows sessions", "deterministic", Policy(_remembers_sessions, "forget"), 1, 0),
    (
        "what no template takes",
        "renders",
        Policy(_returns(lambda m: [edit(m[1], content="odd") if x is m[1] else x for x in m])),
        0,
        None,
    ),
]


def _template(messages: list[Message]) -> str:
    if any(message["content"] == "odd" for message in messages):
        raise ValueError("odd content")
    return json.dumps(messages)


@pytest.mark.parametrize(
    ("rule", "policy", "turn", "message"),
    [case[1:] for case in BROKEN],
    ids=[case[0] for case in BROKEN],
)
def test_broken_policy_is_caught(rule: str, policy: Policy, turn: int, message: int | None) -> None:
    """Each way to break a rule is an assertion error that names rule, turn and message."""
    before = deepcopy(SESSIONS)
    with pytest.raises(AssertionError) as caught:
        check_policy(policy, SESSIONS, render=_template)
    error = caught.value
    assert isinstance(error, RuleBrokenError)
    assert (error.rule, error.session, error.turn, error.message) == (rule, 0, turn, message), error
    assert f"the rule {rule!r}" in str(error)
    assert f"turn {turn}" in str(error)
    assert before == SESSIONS


def test_every_rule_has_a_policy_that_breaks_it() -> None:
    """No rule goes without a proof that the kit checks it."""
    assert {case[1] for case in BROKEN} == set(RULES)


@pytest.mark.parametrize(
    ("rule", "policy"),
    [
        (rule, policy)
        for _, rule, policy, *_ in BROKEN
        if rule in ("system_kept", "same_objects", "notes_numbers", "renders", "last_user_kept")
    ],
)
@pytest.mark.filterwarnings("ignore::leyline_policies.testing.NothingEditedWarning")
def test_a_rule_can_be_left_out(rule: str, policy: Policy) -> None:
    """A rule that a policy breaks on purpose isn't checked when it is named."""
    check_policy(policy, SESSIONS, render=_template, without=[rule])


def test_forgetting_policies_may_edit_instructions() -> None:
    """A secret in the system prompt may be redacted, by mode or by mark; it may not be dropped."""
    redacted = Policy(_returns(lambda m: [edit(m[0], content="[x]"), *m[1:]]), "forget")
    check_policy(redacted, SESSIONS)
    marked = Policy(_returns(lambda m: [edit(m[0], content="[x]", mode="forget"), *m[1:]]))
    marked.forgets = True
    check_policy(marked, SESSIONS)
    with pytest.raises(RuleBrokenError, match="the instructions are gone"):
        check_policy(Policy(_returns(lambda m: m[1:]), "forget"), SESSIONS)


@pytest.mark.filterwarnings("ignore::leyline_policies.testing.NothingEditedWarning")
def test_what_was_broken_before_is_no_fault() -> None:
    """Calls and results that the client left alone, and what no template takes, may stay so."""
    torn = [*TALK[:3], {"role": "user", "content": "odd"}, *TALK[4:]]
    orphan = [TALK[1], TALK[3], TALK[1]]
    keep = Policy(_returns(lambda m: m))
    check_policy(keep, [requests_of(torn), requests_of(orphan)], render=_template)


def test_report_tells_what_was_done() -> None:
    """Turns, edited turns, tokens, and the turns that changed what had been sent."""
    (policy,) = load_pipeline("truncate_older_than:n=0,max_chars=40")
    report = check_policy(policy, SESSIONS)
    assert (report.policy, report.sessions, report.turns) == ("truncate_older_than", 1, 4)
    assert (report.edited_turns, report.rewrites) == (3, 0)
    assert report.reclaimed_tokens == 3 * (50 // 4 - 40 // 4)
    late = Policy(lambda self, m, turn, c: [edit(m[0], name="x"), *m[1:]] if turn > 1 else m)
    late.mode = "forget"
    assert check_policy(late, SESSIONS).rewrites == 1


@pytest.mark.filterwarnings("ignore::leyline_policies.testing.NothingEditedWarning")
def test_plain_function_is_a_policy() -> None:
    """A function is checked under its own name, with or without a context."""

    def short(messages: list[Message], turn_idx: int, *, limit: int = 3) -> list[Message]:
        return [map_text(m, lambda t: t[:limit]) if m["role"] == "user" else m for m in messages]

    def asking(messages: list[Message], turn_idx: int, context: Context) -> list[Message]:
        assert context.window == 128_000
        return messages

    assert check_policy(short, SESSIONS).policy == "short"
    assert check_policy(asking).turns > 20


def test_built_in_policies_pass_on_made_up_sessions() -> None:
    """Sessions are made up when none are given, and policies keep the rules on them."""
    for spec in ("truncate_older_than", r"redact:pattern=sk-\w+", "drop_failed_calls"):
        (policy,) = load_pipeline(spec)
        assert check_policy(policy).reclaimed_tokens > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"without": ["pair_whole"]}, "did you mean 'pairs_whole'"),
        ({"sessions": []}, "no turn to check"),
    ],
)
def test_checking_nothing_is_refused(arguments: dict[str, Any], words: str) -> None:
    """A misspelt rule or no session at all doesn't pass for a check."""
    with pytest.raises(ValueError, match=words):
        check_policy(Policy(_returns(lambda m: m)), **arguments)


def test_made_up_sessions_depend_on_the_seed_only() -> None:
    """The same seed gives the same sessions, another one others."""
    assert synthetic_sessions(3) == synthetic_sessions(3)
    assert synthetic_sessions(3) != synthetic_sessions(4)
    sessions = synthetic_sessions(1, sessions=2, turns=5)
    assert [len(session) for session in sessions] == [6, 6]


def test_made_up_sessions_hold_what_policies_are_for() -> None:
    """Over a few seeds there is everything that a policy may look for, in sound conversations."""
    talks = [session[-1] for seed in range(5) for session in synthetic_sessions(seed)]
    texts = json.dumps(talks, ensure_ascii=False)
    for part in ("image_url", "sk-", "@example.org", "reasoning_content", "Error:", "日本語"):
        assert part in texts
    assert max(len(str(m["content"])) for talk in talks for m in talk) > 10_000
    calls = [pair_calls(talk) for talk in talks]
    assert all(len(call.results) == 1 for found in calls for call in found)
    assert any(len(m.get("tool_calls", ())) == 3 for talk in talks for m in talk)


def test_requests_of_a_conversation() -> None:
    """There is a request before each answer, and one more for what follows the last."""
    assert [len(request) for request in requests_of(TALK)] == [2, 4, 6, 8]
    assert [len(request) for request in requests_of(TALK[:7])] == [2, 4, 6]
    assert requests_of([TALK[4]]) == [[TALK[4]]]
    assert requests_of([]) == []


def test_kit_needs_the_standard_library_only() -> None:
    """Importing and running the kit imports neither pytest nor hypothesis."""
    code = (
        "import sys; before = set(sys.modules)\n"
        "from leyline_policies import load_pipeline\n"
        "from leyline_policies.testing import check_policy\n"
        "check_policy(load_pipeline('truncate_older_than')[0])\n"
        "roots = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "print(sorted(roots - set(sys.stdlib_module_names)))"
    )
    command = [sys.executable, "-c", code]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert output.strip() == "['leyline_policies']"


def test_a_policy_that_edited_nothing_is_named() -> None:
    """The kit warns that the rules for edits weren't tried; a policy that acts gets no warning."""
    idle, acts = Policy(lambda _, messages, *__: messages), Policy(_cuts)
    with pytest.warns(NothingEditedWarning, match="'broken' edited nothing on 4 turns"):
        assert check_policy(idle, SESSIONS).edited_turns == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert check_policy(acts, SESSIONS).edited_turns > 0


def _cuts(self: Policy, messages: list[Message], turn: int, context: Context) -> Any:
    return [map_text(m, lambda text: text[:10]) if m["role"] == "tool" else m for m in messages]
