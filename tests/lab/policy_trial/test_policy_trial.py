"""The arithmetic of a trial, the files it reads, and the pictures and tables it shows."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from leyline_lab.errors import TraceError
from leyline_lab.policy_trial.report import (
    draw_trial,
    mean_by_turn,
    print_trial,
    sum_by_turn,
    tokens,
    verdict,
)
from leyline_lab.policy_trial.rules import RuleCheck, check_rules
from leyline_lab.policy_trial.trial import (
    Prefill,
    SessionTrial,
    TrialOptions,
    TrialReport,
    try_session,
)
from leyline_lab.traces.conversations import read_conversations
from leyline_policies import (
    Context,
    FunctionPolicy,
    Message,
    Mode,
    Policy,
    approximate_tokens,
    drop,
    edit,
    load_pipeline,
)
from leyline_policies.testing import requests_of, synthetic_sessions


def _message(role: str, text: str, size: int = 100) -> Message:
    """A message of ``size`` tokens."""
    message = {"role": role, "content": text + "." * (4 * size - 12 - len(text))}
    assert approximate_tokens(message) == size
    return message


def _talk(turns: int) -> list[Message]:
    """System and user, then answers of 10 tokens and questions of 100."""
    talk = [_message("system", "s"), _message("user", "first")]
    for number in range(turns - 1):
        talk += [_message("assistant", f"a{number}", 10), _message("user", f"u{number}")]
    return talk


def _policy(do: Any, mode: Mode = "amortize", name: str = "test") -> Policy:
    return FunctionPolicy(name, mode, do)


def _stub_first_user_from(turn: int) -> Any:
    """Shortens the first user message to 10 tokens from a turn on."""

    def do(messages: list[Message], turn_idx: int) -> list[Message]:
        if turn_idx < turn:
            return messages
        return [messages[0], edit(messages[1], content="." * 28), *messages[2:]]

    return do


def _prefills(session: SessionTrial) -> list[Prefill]:
    return [turn.prefill for turn in session.turns]


def _try(requests: list[list[Message]], *policies: Policy) -> SessionTrial:
    return try_session("s", requests, policies, TrialOptions())


def test_nothing_edited_costs_what_is_new() -> None:
    """Without edits every kind of cache prefills the new messages, and only those."""
    found = _try(requests_of(_talk(4)))
    assert _prefills(found) == [Prefill(200, 200, 200), *[Prefill(110, 110, 110)] * 3]
    assert [turn.original_tokens for turn in found.turns] == [200, 310, 420, 530]


def test_amortized_edit_is_spliced() -> None:
    """A prefix cache computes all after an edit again, splicing the edited message alone."""
    found = _try(requests_of(_talk(4)), _policy(_stub_first_user_from(2)))
    assert _prefills(found) == [
        Prefill(200, 200, 200),
        Prefill(110, 110, 110),
        Prefill(110, 10 + 10 + 100 + 110, 10 + 110),
        Prefill(110, 110, 110),  # the edit stays as it was
    ]
    edits = [turn.policies["test"] for turn in found.turns]
    assert [(each.edits, each.new_edits, each.reclaimed_tokens) for each in edits] == [
        (0, 0, 0),
        (0, 0, 0),
        (1, 1, 90),
        (1, 0, 90),
    ]


@pytest.mark.parametrize(("anchor_tokens", "expected"), [(1, 120), (21, 140), (1000, 230)])
def test_new_text_costs_what_lies_between_anchors(anchor_tokens: int, expected: int) -> None:
    """A model with recurrent layers computes that again, but never more than without splices."""
    options, policy = TrialOptions(anchor_tokens=anchor_tokens), _policy(_stub_first_user_from(2))
    found = try_session("s", requests_of(_talk(4)), [policy], options)
    assert [each.splice for each in _prefills(found)] == [200, 110, expected, 110]


def test_forget_is_not_spliced() -> None:
    """After an edit that forgets, all is computed again, whatever the cache can do."""
    found = _try(requests_of(_talk(4)), _policy(_stub_first_user_from(2), "forget"))
    assert _prefills(found)[2] == Prefill(110, 230, 230)


def test_forget_before_anything_was_cached_costs_nothing() -> None:
    """A secret that is redacted on its first turn leaves later turns as they are."""
    found = _try(requests_of(_talk(4)), _policy(_stub_first_user_from(0), "forget"))
    assert _prefills(found) == [Prefill(200, 110, 110), *[Prefill(110, 110, 110)] * 3]


def test_dropped_message_costs_nothing_where_it_is_spliced() -> None:
    """Dropping reclaims the message and moves the text after it; forgetting computes that."""

    def gone(messages: list[Message], turn_idx: int) -> list[Message]:
        return messages if turn_idx < 2 else [*messages[:2], drop(messages[2]), *messages[3:]]

    talk = requests_of(_talk(3))
    amortized, forgotten = _try(talk, _policy(gone)), _try(talk, _policy(gone, "forget"))
    assert _prefills(amortized)[2] == Prefill(110, 210, 110)
    assert _prefills(forgotten)[2] == Prefill(110, 210, 210)
    assert amortized.turns[2].policies["test"].reclaimed_tokens == 10


def test_clients_own_edits_are_exact() -> None:
    """The client's own changes are computed again with all after them, on any cache."""
    talk = _talk(3)
    changed = [talk[0], _message("user", "changed"), *talk[2:]]
    removed = [talk[0], *talk[2:]]
    put_in = [talk[0], _message("user", "put in"), *talk[1:]]
    for edited, behind in ((changed, 320), (removed, 220), (put_in, 420)):
        assert _prefills(_try([talk, edited]))[1] == Prefill(behind, behind, behind)


def test_policys_own_messages_are_no_ones_edit() -> None:
    """A message that a policy puts in, moves forward or takes back doesn't cost the text after
    it."""

    def note(messages: list[Message], turn_idx: int) -> list[Message]:
        said = _message("user", f"note {turn_idx}", 20)
        return messages if turn_idx == 2 else [messages[0], said, *messages[1:]]

    found = _try(requests_of(_talk(4)), _policy(note))
    assert [each.splice for each in _prefills(found)] == [220, 130, 110, 130]
    assert [turn.policies["test"].reclaimed_tokens for turn in found.turns] == [-20, -20, 0, -20]


def test_tokens_count_for_the_last_policy_that_edited() -> None:
    """Two policies on one message both edit it; what it saves counts once."""
    first = _policy(_stub_first_user_from(0), name="first")
    second = _policy(
        lambda messages, _: [messages[0], edit(messages[1], content=""), *messages[2:]],
        name="second",
    )
    turn = _try([_talk(1)], first, second).turns[0]
    assert (turn.policies["first"].edits, turn.policies["first"].reclaimed_tokens) == (1, 0)
    assert (turn.policies["second"].edits, turn.policies["second"].reclaimed_tokens) == (1, 97)


def test_state_idle_time_and_window_are_handed_on() -> None:
    """A policy finds its state on the next turn, and the facts that it was promised."""

    def remembers(messages: list[Message], turn_idx: int, context: Context) -> list[Message]:
        context.note("seen", times=context.state.setdefault("times", 0))
        context.state["times"] += 1
        assert context.state["times"] == turn_idx + 1
        assert (context.window, context.idle_s) == (1000, 30.0 if turn_idx else 0.0)
        return messages

    policy = _policy(remembers)
    found = try_session("s", requests_of(_talk(3)), [policy], TrialOptions(1000, 30.0))
    assert all(not turn.faults for turn in found.turns)
    assert TrialReport((found,)).totals().notes == {"test:seen": 3}


def test_faults_are_counted_by_policy() -> None:
    """A policy that raises, hangs or drops the user's message is named, and the rest continues."""

    def hangs(messages: list[Message], turn_idx: int) -> list[Message]:
        return messages if turn_idx else [1 / 0]  # type: ignore[list-item]

    loses = _policy(lambda messages, _: messages[:-1], name="loses")
    report = TrialReport((_try(requests_of(_talk(3)), _policy(hangs), loses),))
    assert report.totals().faults == {"test:raised": 1, "loses:lost_last_user": 3}
    assert report.totals().reclaimed_tokens == 0


@pytest.mark.parametrize(("mode", "refused"), [("forget", 2), ("amortize", 0)])
def test_refused_requests_are_counted(mode: Mode, refused: int) -> None:
    """A policy that forgets and fails costs the request in the proxy; one that tidies up, its
    edit."""

    def fails(messages: list[Message], turn_idx: int) -> list[Message]:
        return messages if turn_idx < 2 else [1 / 0]  # type: ignore[list-item]

    report = TrialReport((_try(requests_of(_talk(4)), _policy(fails, mode)),))
    totals = report.totals()
    assert (totals.faults, totals.refused) == ({"test:raised": 2}, refused)
    turns = report.to_json()["sessions"][0]["by_turn"]
    assert [turn["refused"] for turn in turns] == [False, False, *[refused > 0] * 2]
    shown = f"refused: {refused} of 4 requests, because a policy that forgets fails"
    assert (shown in " ".join(_shown(report, None).split())) is (refused > 0)
    text = "The policies edit nothing on these sessions, and fail on some turns."
    assert verdict(totals) == text


def test_rules_are_claimed_of_policies_that_keep_them() -> None:
    """A policy is searched up to the first rule that it breaks, so no other rule is vouched for."""
    splits = _policy(lambda messages, _: messages[:-1], name="splits")
    calm = _policy(lambda messages, _: messages, name="calm")
    sessions = [("s", requests_of(_talk(3)))]
    report = TrialReport(())
    for policies, kept in (((splits, calm), True), ((splits,), False)):
        rules = check_rules(policies, sessions, most_turns=9, window=None)
        text = _shown(report, rules)
        assert "rule broken: splits, last_user_kept" in text
        assert "a policy is checked up to the first rule that it breaks" in text
        assert ("rules: kept on 3 of 3 turns (calm)" in text) is kept
        assert "splits)" not in text


def _shown(report: TrialReport, rules: RuleCheck | None) -> str:
    console = Console(record=True, width=120, force_terminal=False, file=io.StringIO())
    print_trial(console, report, "title", turns=False, rules=rules)
    return console.export_text()


specs = st.sampled_from(
    [
        "truncate_older_than:n=1,max_chars=60",
        "drop_failed_calls",
        r"redact:pattern=sk-\w+",
        "truncate_older_than:n=0,when='tokens > 400' | drop_failed_calls",
        r"drop_failed_calls | redact:pattern=moves | truncate_older_than",
    ]
)


@given(specs, st.integers(0, 50))
def test_figures_add_up(spec: str, seed: int) -> None:
    """Policies reclaim exactly the unsent part, and splicing never costs more than a prefix."""
    policies = load_pipeline(spec)
    for session in synthetic_sessions(seed, sessions=1, turns=8):
        found = try_session("s", session, policies, TrialOptions())
        for turn in found.turns:
            reclaimed = sum(each.reclaimed_tokens for each in turn.policies.values())
            assert reclaimed == turn.original_tokens - turn.sent_tokens
            assert turn.prefill.splice <= turn.prefill.prefix <= turn.sent_tokens
        told = TrialReport((found,)).to_json()
        assert json.loads(json.dumps(told)) == told
        by_turn = told["sessions"][0]["by_turn"]
        assert (
            sum(each["reclaimed_tokens"] for each in by_turn) == told["total"]["reclaimed_tokens"]
        )


def test_recorded_sessions_show_what_splicing_saves(traces_dir: Path) -> None:
    """On coding sessions edits cost a prefix cache much, and a spliced one next to nothing."""
    trace = read_conversations(traces_dir / "sessions_mini_swe_deepseek.jsonl.gz")
    session = trace.sessions[0]
    requests = [list(request.messages) for request in session.requests]
    policies = load_pipeline("truncate_older_than:n=8 | drop_failed_calls")
    totals = TrialReport((try_session(session.id, requests, policies, TrialOptions()),)).totals()
    assert totals.faults == {}
    assert totals.reclaimed_tokens > 0.3 * totals.original_tokens
    assert totals.prefill.prefix > 2 * totals.prefill.splice
    assert totals.prefill.splice < 1.1 * totals.prefill.unedited


# Reading


def _request(count: int = 3) -> dict[str, Any]:
    return {"model": "m", "messages": _talk(count), "tools": [{"type": "function"}]}


@pytest.mark.parametrize(
    ("name", "text", "turns"),
    [
        ("list.json", json.dumps(_talk(3)), [3]),
        ("list.json", json.dumps(_talk(3), indent=2), [3]),
        ("request.json", json.dumps(_request()), [3]),
        ("requests.jsonl", "\n".join(json.dumps(_request(n)) for n in (1, 4)) + "\n", [1, 4]),
        ("lists.jsonl", "\n".join(json.dumps(_talk(n)) for n in (2, 3)), [2, 3]),
        ("messages.jsonl", "\n\n".join(map(json.dumps, _talk(3))), [3]),
        ("one.jsonl", json.dumps(_talk(1)[1]), [1]),
        ("trace.jsonl", json.dumps({"messages": _talk(3), "calls": [{"n": 2}, {"n": 4}]}), [2]),
        (
            "pooled.jsonl",
            "\n".join([json.dumps({"pool": _talk(3), "requests": [[0, 1], [0, 1, 2, 3]]})] * 2),
            [2, 2],
        ),
    ],
)
def test_each_shape_is_read(tmp_path: Path, name: str, text: str, turns: list[int]) -> None:
    """Lists, requests, lines of either, and recordings are distinguished by their content."""
    file, packed = tmp_path / name, tmp_path / f"{name}.gz"
    file.write_text(text)
    packed.write_bytes(gzip.compress(text.encode()))
    for path in (file, packed):
        sessions = read_conversations(path).sessions
        assert [len(session.requests) for session in sessions] == turns


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no session"),
        ("{", "line 1: not JSON"),
        ('{"role": "user", "content": "a"}\n{"role": 5}', "role must be one of"),
        ('[{"role": "user", "content": "a"}]\nnonsense', "line 2: not JSON"),
        ('{"a": 1}', "messages must be a list"),
        ("[]", "at least one message"),
        ("[1]", "must be an object"),
        ('{"calls": 1, "messages": []}', "calls"),
    ],
)
def test_unreadable_file_is_explained(tmp_path: Path, text: str, words: str) -> None:
    """A file of another shape names the line and what is wrong."""
    file = tmp_path / "x.jsonl"
    file.write_text(text)
    with pytest.raises(TraceError, match=words):
        read_conversations(file)


@pytest.mark.parametrize("name", ["absent.json", "bad.gz", "latin.json"])
def test_file_that_cannot_be_opened_is_named(tmp_path: Path, name: str) -> None:
    """No such file, no gzip and no UTF-8 are errors with the file's name."""
    (tmp_path / "bad.gz").write_bytes(b"no gzip")
    (tmp_path / "latin.json").write_bytes(b'"\xff"')
    with pytest.raises(TraceError, match=f"cannot read .*{name}"):
        read_conversations(tmp_path / name)


# Showing


@pytest.fixture
def report() -> TrialReport:
    """A trial of several sessions, with edits, a fault and a note."""

    def notes(messages: list[Message], turn_idx: int, context: Context) -> list[Message]:
        context.note("near_limit", fraction=0.5)
        return messages if turn_idx else [1 / 0]  # type: ignore[list-item]

    policies = [*load_pipeline("truncate_older_than:n=0"), _policy(notes, name="noisy")]
    return TrialReport(
        tuple(
            try_session(f"session {number}", session, policies, TrialOptions())
            for number, session in enumerate(synthetic_sessions(0, sessions=14, turns=5))
        )
    )


def test_table_shows_figures_and_faults(report: TrialReport) -> None:
    """Sessions, their sum, policies, faults, notes and the verdict are there, in 80 columns."""
    console = Console(record=True, width=80, force_terminal=False, file=io.StringIO())
    print_trial(console, report, "a title", turns=False)
    text = console.export_text()
    for part in (
        "a title", "session 0", "all 14", "2 more", "unedited", "splice", "truncate_older_than",
        "fault: noisy:raised, 14 times", "note: noisy:near_limit", "are reclaimed",
    ):  # fmt: skip
        assert part in text
    assert "…" not in text.split("2 more")[0].replace("… ", "")
    assert "turn " not in text


def test_turns_are_shown_on_demand(report: TrialReport) -> None:
    """Each session's turns, with the policies that edit again, are a table of their own."""
    console = Console(record=True, width=100, force_terminal=False, file=io.StringIO())
    print_trial(console, TrialReport(report.sessions[:1]), "title", turns=True)
    assert "truncate_older_than 1" in console.export_text()


def test_verdict_is_honest() -> None:
    """The trial says so if nothing was edited, or if there was nothing to edit."""
    calm = TrialReport((_try(requests_of(_talk(2)), _policy(lambda m, _: m)),))
    assert verdict(calm.totals()) == "The policies edit nothing on these sessions."
    assert verdict(TrialReport(()).totals()) == "There is no prompt to edit."


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0"),
        (999, "999"),
        (1000, "1K"),
        (41_252, "41.3K"),
        (999_999, "1M"),
        (1_780_000, "1.78M"),
        (-2500, "-2.5K"),
        (10**12, "1e+03G"),
    ],
)
def test_numbers_fit_a_narrow_cell(count: int, text: str) -> None:
    """Numbers are shown with three digits and a unit."""
    assert tokens(count) == text


def test_picture_is_drawn(report: TrialReport, tmp_path: Path) -> None:
    """A PNG is written, folders included, from means of prompts and sums of prefill."""
    out = tmp_path / "pictures" / "trial.png"
    draw_trial(report, out, "a title")
    assert out.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    uneven = TrialReport((_try([_talk(1)]), _try(requests_of(_talk(2)))))
    assert mean_by_turn(uneven, lambda turn: turn.original_tokens) == [200, 310]
    assert sum_by_turn(uneven, lambda turn: turn.prefill.prefix) == [400, 510]
