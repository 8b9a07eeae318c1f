"""Policies made of policies: what is committed stays, what is protected stays, marks survive."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import pytest

from leyline_policies import Context, Memo, Message, Mode, Policy, drop, edit, map_text, run
from leyline_policies.builtin.keep_all import KeepAll
from leyline_policies.builtin.redact import Redact
from leyline_policies.compose import (
    all_gates,
    at_least,
    dry_run,
    every,
    pipeline,
    protect,
    when,
    whole_pairs,
)
from leyline_policies.context import apply
from leyline_policies.gates import at_least_gate, every_gate, when_gate
from leyline_policies.marks import Mark, is_dropped, mark_of
from leyline_policies.testing import check_policy, requests_of
from leyline_policies.triggers import messages as more_messages
from leyline_policies.triggers import tokens, turns


@dataclass(frozen=True)
class Clear:
    """Clears all tool results; by hand or with marks."""

    name: ClassVar[str] = "clear"
    mode: Mode = "amortize"
    by_hand: bool = False
    trusted: ClassVar[bool] = True

    def transform(self, messages: list[Message], turn_idx: int, context: Context) -> list[Message]:
        """Count the calls in the state, and clear."""
        context.state["calls"] = context.state.get("calls", 0) + 1
        context.note("cleared", turn=context.turn, idle_s=context.idle_s)
        return [
            message
            if message["role"] != "tool"
            else {**message, "content": "[cleared]"}
            if self.by_hand
            else context.once(message, lambda m: edit(m, stub="[cleared]"))
            for message in messages
        ]


@dataclass(frozen=True)
class Does:
    """A policy that does what it is given."""

    name: str
    do: Callable[[list[Message]], list[Message]]
    mode: Mode = "amortize"

    def transform(self, messages: list[Message], turn_idx: int) -> list[Message]:
        """Do it."""
        return self.do(messages)


def _step(number: int, text: str = "x" * 400, tool: str = "bash") -> list[Message]:
    body = {"name": tool, "arguments": "{}"}
    call = {"id": f"c{number}", "type": "function", "function": body}
    return [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": f"c{number}", "content": text},
    ]


def _talk(steps: int) -> list[Message]:
    head: list[Message] = [{"role": "system", "content": "s"}, {"role": "user", "content": "go"}]
    return [*head, *(message for number in range(steps) for message in _step(number))]


TALK = _talk(12)


def _play(
    policy: Policy, talk: list[Message] = TALK, idle_s: float = 1.0
) -> tuple[list[list[Message]], Context]:
    """Return the messages sent on each turn, and the last turn's context; the state makes a trip as
    JSON."""
    state, memo, sent = "{}", Memo(), []
    context = Context()
    for turn, request in enumerate(requests_of(talk)):
        memo.next_turn()
        context = Context(turn, state=json.loads(state), memo=memo, idle_s=idle_s * turn)
        sent.append(apply(policy, request, turn, context))
        state = json.dumps(context.state)
    return sent, context


def _cleared(messages: list[Message]) -> int:
    return sum(message["content"] == "[cleared]" for message in messages)


def test_what_was_committed_stays_committed() -> None:
    """A gated policy edits when its trigger holds, and then sends the same until it holds again."""
    sent, _ = _play(when(tokens(500), Clear()))
    counts = [_cleared(messages) for messages in sent]
    assert counts == [*[0] * 5, *[5] * 5, *[10] * 3]
    for before, after in pairwise(sent):
        if _cleared(before) == _cleared(after):
            assert after[: len(before)] == before


def test_trigger_is_asked_of_what_would_be_sent() -> None:
    """Tokens reclaimed once don't hold a trigger open; the client resends them on every turn."""
    sent, _ = _play(when(tokens(500), Clear()))
    assert all(Context().total(messages) <= 500 for messages in sent)
    assert Context().total(TALK) > 1000
    assert 0 < _cleared(sent[-1]) < 12


def test_every_acts_on_every_nth_turn() -> None:
    """The committed part grows on the first turn and on each n-th after it."""
    sent, _ = _play(every(4, Clear()))
    assert [_cleared(messages) for messages in sent] == [0] * 4 + [4] * 4 + [8] * 4 + [12]


def test_at_least_waits_until_it_pays() -> None:
    """The committed part grows when that reclaims the tokens asked for, beyond what it has."""
    each = Context().tokens(_step(0)[1]) - Context().tokens(edit(_step(0)[1], stub="[cleared]"))
    sent, _ = _play(at_least(3 * each, Clear()))
    assert [_cleared(messages) for messages in sent] == [turn // 3 * 3 for turn in range(13)]


def test_gates_must_open_together() -> None:
    """A policy inside several gates acts only when all are open."""
    gates = [when_gate(turns(5)), every_gate(2), at_least_gate(100)]
    sent, _ = _play(all_gates(Clear(), gates))
    assert [_cleared(messages) for messages in sent] == [0] * 6 + [6, 6, 8, 8, 10, 10, 12]


def test_inner_policy_sees_the_facts_of_the_commit() -> None:
    """Turn and idle time that a committed policy sees are those of the turn that committed."""
    _, context = _play(every(5, Clear()))
    assert [(note.values["turn"], note.values["idle_s"]) for note in context.notes] == [(10, 10.0)]


def test_asking_what_an_edit_gains_leaves_no_trace() -> None:
    """Attempts neither count in the inner policy's state nor repeat its notes."""
    _, context = _play(at_least(1, Clear()))
    assert len(context.notes) == 1
    assert context.state["inner"]["clear"]["calls"] == 12  # one per turn, none on the first


def test_gates_may_be_nested() -> None:
    """A gated policy inside a gated one keeps a state of its own."""
    nested = when(turns(2), at_least(300, Clear()))
    sent, _ = _play(nested)
    assert [_cleared(messages) for messages in sent][:5] == [0, 0, 0, 0, 4]
    check_policy(nested)


def test_nothing_to_do_returns_the_very_list() -> None:
    """Wrappers hand back the list itself where nothing changes, so that it need not be compared."""
    calm = Does("calm", lambda messages: messages)
    for policy in (
        when(turns(99), Clear()),
        when(turns(-1), calm),
        protect(calm, keep_last=1),
        dry_run(Clear()),
        pipeline(calm, calm),
    ):
        talk = list(TALK)
        assert run(policy, talk, 0, Context()) is talk


def test_shortened_history_is_no_trouble() -> None:
    """When the client itself cuts its history, what is left counts as committed."""
    policy, state = when(more_messages(20), Clear()), Context().state
    apply(policy, TALK, 0, Context(0, state=state))
    assert state["committed"] == len(TALK)
    short = _talk(2)
    assert _cleared(apply(policy, short, 1, Context(1, state=state))) == 2
    assert state["committed"] == len(short)


@pytest.mark.parametrize("by_hand", [True, False])
@pytest.mark.parametrize(
    ("guard", "cleared"),
    [
        ({"keep_last": 4}, 10),
        ({"keep_first": 5}, 10),
        ({"keep_last": 3}, 10),  # the call of the second result stays with it
        ({"roles": ["tool"]}, 0),
        ({"roles": ["user"]}, 12),
        ({"tools": ["bash"]}, 0),
        ({"tags": ["keep"]}, 12),
        ({"keep_last": 999}, 0),
    ],
)
def test_protected_messages_stay(
    guard: dict[str, int | list[str]], cleared: int, by_hand: bool
) -> None:
    """Protected messages are sent unchanged, once and in their place, however the policy edits."""
    policy = protect(Clear(by_hand=by_hand), **guard)  # type: ignore[arg-type]
    after = apply(policy, list(TALK), 0, Context())
    assert [message["role"] for message in after] == [message["role"] for message in TALK]
    assert _cleared(after) == cleared


def test_protected_pair_is_put_back_whole() -> None:
    """A policy that drops all calls can't drop half of a protected pair."""
    talk = [*_talk(2), {"role": "user", "content": "and"}, *_step(9, "kept", "skill")]
    talk[-1]["tags"] = ["keep"]
    nothing = Does("nothing", lambda messages: [m for m in messages if m["role"] != "tool"][:2])
    for policy in (protect(nothing, tags=["keep"]), protect(nothing, tools=["skill"])):
        assert apply(policy, talk, 0, Context()) == [*talk[:2], *talk[-2:]]


def test_protected_tool_without_an_answer_stays() -> None:
    """A call that is still unanswered is protected too."""
    talk = [{"role": "user", "content": "go"}, *_step(1)[:1]]
    cut = Does("cut", lambda messages: messages[:1])
    assert apply(protect(cut, tools=["bash"]), talk, 0, Context()) == talk
    assert apply(protect(cut, tools=["else"]), talk, 0, Context()) == talk[:1]


def test_pipeline_hands_on_what_the_policy_before_made() -> None:
    """Each policy gets the result of the one before, without what was dropped."""
    seen: list[int] = []

    def look(messages: list[Message]) -> list[Message]:
        seen.append(len(messages))
        return messages

    gone = Does("gone", lambda messages: [drop(messages[0], cause="old"), *messages[1:]])
    both = pipeline(gone, Does("look", look), gone)
    assert apply(both, list(TALK), 0, Context()) == TALK[2:]
    assert seen == [len(TALK) - 1]
    marks = [mark_of(m) for m in run(both, list(TALK), 0, Context()) if is_dropped(m)]
    assert marks == [Mark(cause="old", dropped=True)] * 2


def _forget_first(messages: list[Message]) -> list[Message]:
    return [edit(messages[0], content="[secret]", mode="forget", cause="key"), *messages[1:]]


@pytest.mark.parametrize(
    "later",
    [
        lambda messages: messages,
        lambda messages: [edit(messages[0], name="n"), *messages[1:]],
        lambda messages: [edit(messages[0], mode="amortize", name="n"), *messages[1:]],
        lambda messages: [{**messages[0], "content": "S"}, *messages[1:]],
        lambda messages: [map_text(messages[0], str.upper), *messages[1:]],
        lambda messages: messages[1:],
        lambda messages: [drop(messages[0]), *messages[1:]],
    ],
)
def test_forget_survives_every_later_policy(
    later: Callable[[list[Message]], list[Message]],
) -> None:
    """A message that one policy marked as forget is forgotten, whatever a later one makes of it."""
    both = pipeline(Does("first", _forget_first), Does("later", later))
    assert both.mode == "amortize"
    after = run(both, list(TALK), 0, Context())
    mark = mark_of(after[0])
    assert mark is not None
    assert mark.mode == "forget"
    assert [m for m in after if not is_dropped(m)][-1] is TALK[-1]


def test_redaction_in_a_pipeline_is_not_taken_back() -> None:
    """A later edit that calls itself harmless doesn't lift the mode of a pipeline that forgets."""
    tidy = Does(
        "tidy",
        lambda messages: [edit(m, mode="amortize", content=m["content"][:99]) for m in messages],
    )
    secret: list[Message] = [
        {"role": "user", "content": "sk-abc"},
        {"role": "user", "content": "plain"},
    ]
    both = pipeline(Redact("sk-abc"), tidy)
    assert both.mode == "forget"
    redacted, plain = run(both, secret, 0, Context())
    assert redacted["content"] == "[redacted]"
    marks = [mark_of(redacted), mark_of(plain)]
    assert [mark.mode for mark in marks if mark is not None] == [None, "amortize"]


def test_dry_run_reports_and_does_nothing() -> None:
    """The note says how many messages would change and how many tokens that reclaims."""
    for policy in (Clear(), Clear(by_hand=True)):
        context = Context(policy="clear")
        talk = list(TALK)
        assert run(dry_run(policy), talk, 0, context) is talk
        told = next(note for note in context.notes if note.kind == "dry_run")
        assert told.values["messages"] == 12
        assert told.values["reclaimed_tokens"] == context.total(TALK) - context.total(
            apply(policy, TALK, 0, Context())
        )


def test_wrappers_say_what_the_inner_policy_says() -> None:
    """Name, mode, trust and whether anything is edited come from what is wrapped."""
    trusted, stranger = Clear(mode="forget"), Does("stranger", lambda messages: messages)
    kept = protect(trusted, keep_last=1)
    assert (kept.name, kept.mode, kept.trusted) == ("clear", "forget", True)
    for wrap in (lambda p: when(turns(1), p), lambda p: protect(p, keep_last=1)):
        wrapped = wrap(Clear())
        assert (wrapped.name, wrapped.mode, wrapped.trusted) == ("clear", "amortize", True)
        assert not getattr(wrap(stranger), "trusted", False)
        assert wrap(KeepAll()).edits is False
    assert (dry_run(trusted).mode, pipeline(trusted, stranger).mode) == ("amortize", "forget")
    assert getattr(pipeline(trusted, stranger), "trusted", None) is False
    assert getattr(pipeline(trusted, KeepAll()), "edits", None) is True


@pytest.mark.parametrize(
    "gated",
    [lambda p: when(turns(1), p), lambda p: every(2, p), lambda p: at_least(9, p)],
    ids=["when", "every", "at_least"],
)
def test_forgetting_does_not_wait(gated: Callable[[Policy], Policy]) -> None:
    """A condition on a policy that forgets is refused, or a secret would stay for some turns."""
    with pytest.raises(ValueError, match="redact forgets, and that never waits"):
        gated(Redact("sk-abc"))


def test_committed_part_splits_no_pair() -> None:
    """A cut between a call and any of its results moves in front of the call."""
    talk = [*_talk(2), *_step(5)[:1], {"role": "user", "content": "wait"}, *_step(5)[1:]]
    assert [whole_pairs(talk, end) for end in range(len(talk) + 1)] == [
        *(0, 1, 2, 2, 4, 4, 6, 6, 6, 9),
    ]
    orphans: list[Message] = [{"role": "tool", "tool_call_id": "x", "content": ""}] * 3
    assert whole_pairs(orphans, 2) == 0


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: every(0, KeepAll()), "1 turn or more"),
        (lambda: at_least(0, KeepAll()), "1 token or more"),
        (lambda: protect(KeepAll(), keep_last=-1), "0 or more"),
    ],
)
def test_numbers_out_of_range_are_refused(make: Callable[[], Policy], words: str) -> None:
    """A wrapper that could never act as meant is refused when it is made."""
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize(
    "policy",
    [
        when(tokens(800), Clear()),
        every(3, Clear(by_hand=True)),
        protect(Redact(r"sk-\w+"), keep_first=1),
        protect(Redact(r"\w+@\w+\.org"), keep_first=2, keep_last=2, roles=["user"]),
        protect(Does("tail", lambda messages: [*messages[:1], *messages[-1:]]), roles=["user"]),
        pipeline(Redact("cache"), Clear(), when(turns(3), Clear())),
        dry_run(Clear()),
    ],
    ids=["when", "every", "at_least", "protect", "protect-all-pairs", "pipeline", "dry_run"],
)
@pytest.mark.filterwarnings("ignore::leyline_policies.testing.NothingEditedWarning")
def test_wrappers_keep_the_rules(policy: Policy) -> None:
    """Every wrapper around a policy that keeps the rules keeps them on made-up sessions."""
    pairs_may_break = policy.name == "tail"
    check_policy(policy, without=["pairs_whole"] if pairs_may_break else [])
