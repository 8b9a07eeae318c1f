"""Reuse in a session without a certain name: whoever sends the same messages is in it, so no KV may
remember what its list doesn't show.

The judge keeps an engine's KV as what each token has read, by the secrets that messages hold.
"""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from support.character_turns import ANYTHING, Rule, plan_of, render, retained
from support.sessions import after_turn, blank, history

from leyline_engine.contract import CopySegment, LineageRun, Mode, Outcome, Reason, common_prefix
from leyline_proxy.edits.prepare import prepare
from leyline_proxy.model.messages import Message, fingerprint
from leyline_proxy.model.prepared import Prepared
from leyline_proxy.model.session import RetainedTurn
from leyline_proxy.model.undeclared import UndeclaredRules
from leyline_proxy.plan.synthesis import TurnPlan
from leyline_proxy.request.declared import DeclaredEdit

UNNAMED = replace(ANYTHING, trust="messages")
COUNT = 5
Reads = list[frozenset[int]]


def secret(index: int) -> str:
    """The secret that only message ``index`` holds."""
    return f"<secret {index}>"


def message(index: int, text: str) -> Message:
    """A message of a conversation whose roles alternate."""
    role = ("system", "user", "assistant")[0 if index == 0 else 2 - index % 2]
    return {"role": role, "content": f"message {index} begins here; {text}; and here it ends"}


def talk(count: int, *without: int) -> list[Message]:
    """A conversation, some of whose messages have lost their secrets."""
    return [message(i, "nothing" if i in without else secret(i)) for i in range(count)]


def shown(messages: list[Message]) -> frozenset[int]:
    """Secrets that a message list holds."""
    return frozenset(
        i for i in range(COUNT) if any(secret(i) in str(each["content"]) for each in messages)
    )


class Engine:
    """The reads of every turn's KV, and the lineage under which it lies."""

    def __init__(self) -> None:
        self.turns: list[RetainedTurn] = []
        self.reads: list[Reads] = []

    def serve(self, prepared: Prepared, rules: UndeclaredRules, output: str) -> TurnPlan:
        """Run a turn as it is planned, and retain it."""
        plan = plan_of(self.turns, prepared, rules)
        tokens = render(prepared.messages).tokens
        text = "".join(map(chr, tokens)) + output
        known: dict[int, frozenset[int]] = self._cached(tokens, plan)
        moved = len(tokens)
        names = {turn.turn: place for place, turn in enumerate(self.turns)}
        for each in plan.segments:
            if isinstance(each, CopySegment):
                source = names[plan.sources[each.source].turn]
                for at in range(each.start, each.end):
                    known[each.dest + at - each.start] = self.reads[source][at]
                moved = min(moved, each.dest) if each.dest else moved
        reads: Reads = []
        seen: frozenset[int] = frozenset()
        for at in range(len(text)):
            here = frozenset(i for i in range(COUNT) if text.startswith(secret(i), at))
            # A computed token reads all that is before it, with the reads of that.
            own = known.get(at, seen | here)
            seen |= own
            reads.append(own)
        runs = plan.lineage
        if moved < len(tokens):
            runs = (*runs, LineageRun(moved, f"l{len(self.turns)}"))
        self.turns.append(retained(prepared, f"t{len(self.turns)}", output, runs))
        self.reads.append(reads)
        return plan

    def _cached(self, tokens: object, plan: TurnPlan) -> dict[int, frozenset[int]]:
        """KV under the plan's lineage; all that is before it is exact, and as if computed."""
        best: dict[int, frozenset[int]] = {}
        for turn, reads in zip(self.turns, self.reads, strict=True):
            if plan.lineage and turn.lineage[: len(plan.lineage)] == plan.lineage:
                same = common_prefix(turn.tokens, tokens)  # type: ignore[arg-type]
                end = min([same, *(r.start for r in turn.lineage[len(plan.lineage) :])])
                start = plan.lineage[0].start
                if end > start + len(best):
                    best = {at: reads[at] for at in range(start, end)}
        return best


@st.composite
def turns(draw: st.DrawFn) -> tuple[Prepared, str]:
    """A turn of anybody: a list that lacks what its caller cut, a policy's cut, declared edits."""
    places = st.integers(0, COUNT - 1)
    count = draw(st.integers(2, COUNT))
    cut = draw(st.sets(places, max_size=2))
    client = [*talk(count, *cut), message(count, f"and question {draw(st.integers(0, 1))}")]
    if draw(st.booleans()):
        del client[draw(st.integers(0, count - 1))]
    policies = [Rule(secret(draw(places)), "nothing")] if draw(st.booleans()) else []
    edits = []
    if draw(st.booleans()):
        place = draw(st.integers(0, len(client) - 2))
        words = draw(st.sampled_from([None, message(place, "nothing")["content"]]))
        edits = [DeclaredEdit(message=place, replacement=words, mode=Mode.AMORTIZE)]
    return prepare(client, policies, edits, 1), draw(
        st.sampled_from(["", "an answer, rather long"])
    )


@given(st.lists(turns(), min_size=2, max_size=6))
def test_no_kv_remembers_what_the_list_does_not_show(given: list[tuple[Prepared, str]]) -> None:
    """This holds however lists are edited, and for anyone's turns in a session without a name."""
    engine = Engine()
    for prepared, output in given:
        engine.serve(prepared, UNNAMED, output)
        visible = shown(list(prepared.client))
        hidden = {i for read in engine.reads[-1] for i in read} - visible
        assert not hidden, (prepared.client, hidden)


def cut_by_policy(engine: Engine, rules: UndeclaredRules) -> None:
    """Two turns of A, whose list shows a secret that a policy has cut: spliced KV has read it."""
    engine.serve(prepare(talk(4), [], [], 0), rules, "")
    plan = engine.serve(prepare(talk(5), [Rule(secret(1), "nothing")], [], 1), rules, "")
    assert plan.planned is Outcome.SPLICED
    assert 1 in engine.reads[-1][-1]


def test_a_visible_list_does_not_find_what_a_policy_cut() -> None:
    """B sends what A's prompt showed: it is served, from KV that has read nothing else; under a
    certain name the same list continues where A's turn ended."""
    for rules, expected in ((UNNAMED, frozenset[int]()), (ANYTHING, frozenset({1}))):
        engine = Engine()
        cut_by_policy(engine, rules)
        plan = engine.serve(prepare(talk(5, 1), [], [], 2), rules, "")
        assert {i for read in engine.reads[-1] for i in read} - {0, 2, 3, 4} == expected
    assert plan.planned is Outcome.UNEDITED


def test_all_that_is_spliced_is_left_from_the_first_place_on() -> None:
    """If a turn was spliced at several places, the text between them remembers, too."""
    engine = Engine()
    cut_by_policy(engine, UNNAMED)
    both = [Rule(secret(1), "nothing"), Rule(secret(3), "nothing", name="second")]
    engine.serve(prepare([*talk(5), message(5, "more")], both, [], 2), UNNAMED, "")
    assert len(engine.turns[-1].lineage) == 2
    engine.serve(prepare(talk(5, 1, 3), [], [], 3), UNNAMED, "")
    assert {i for read in engine.reads[-1] for i in read} == {0, 2, 4}


def test_a_list_that_shows_all_of_it_goes_on_with_what_is_spliced() -> None:
    """A message that the caller puts in hides nothing of what was there."""
    engine = Engine()
    cut_by_policy(engine, UNNAMED)
    inserted = [*talk(4), message(7, "put in"), *talk(5)[4:]]
    plan = plan_of(engine.turns, prepare(inserted, [Rule(secret(1), "nothing")], [], 2), UNNAMED)
    assert plan.lineage == engine.turns[-1].lineage
    assert plan.reason is Reason.UNNAMED_SESSION  # of the insertion itself


def test_the_account_says_that_a_name_was_missing() -> None:
    """The account gives its own reason and the message that differs; an exact edit for other
    reasons gives another."""
    engine = Engine()
    cut_by_policy(engine, UNNAMED)
    plan = engine.serve(prepare(talk(5, 1), [], [], 2), UNNAMED, "")
    assert (plan.planned, plan.reason) == (Outcome.REPREFILLED, Reason.UNNAMED_SESSION)
    assert [(e.message, e.cause, e.mode) for e in plan.edits] == [(1, "undeclared", "exact")]
    assert plan.lineage == ()
    tool_alone = UndeclaredRules.parse(["tool=amortize"])
    for rules, reason in (
        (UNNAMED, Reason.UNNAMED_SESSION),
        (replace(tool_alone, trust="messages"), Reason.REPREFILLED),
        (UndeclaredRules(trust="messages"), Reason.REPREFILLED),
    ):
        engine = Engine()
        engine.serve(prepare(talk(5), [], [], 0), rules, "")
        plan = engine.serve(prepare(talk(5, 1), [], [], 1), rules, "")
        assert (plan.planned, plan.reason) == (Outcome.REPREFILLED, reason)
        assert {e.mode for e in plan.edits} == {"exact"}


def test_a_declaration_proves_nothing_of_who_declares() -> None:
    """Any sender of the visible list may say that its own change is meant."""
    engine = Engine()
    engine.serve(prepare(talk(5), [], [], 0), UNNAMED, "")
    said = [DeclaredEdit(message=1)]
    plan = engine.serve(prepare(talk(5, 1), [], said, 1), UNNAMED, "")
    assert (plan.planned, plan.reason) == (Outcome.REPREFILLED, Reason.UNNAMED_SESSION)
    assert [(e.cause, e.mode) for e in plan.edits] == [("declared", "exact")]
    named = plan_of(engine.turns[:1], prepare(talk(5, 1), [], said, 1), ANYTHING)
    assert named.planned is Outcome.SPLICED


def test_policies_splice_in_sessions_without_a_name() -> None:
    """Their edits are of text that the caller's list still shows, on this turn and the next."""
    engine, cut = Engine(), [Rule(secret(1), "nothing")]
    cut_by_policy(engine, UNNAMED)
    more = [*talk(5), message(5, "more")]
    plan = engine.serve(prepare(more, cut, [], 2), UNNAMED, "")
    assert plan.planned is Outcome.UNEDITED and plan.lineage
    declared = [DeclaredEdit(message=2, replacement="gone")]
    assert engine.serve(prepare(more, cut, declared, 3), UNNAMED, "").planned is Outcome.SPLICED


def test_a_harness_name_is_of_the_conversations_that_open_alike() -> None:
    """Under one name, a list with another task or another first answer takes nothing from a turn
    but what it would without a name; the same conversation is spliced, however it is cut."""
    harness = replace(ANYTHING, trust="opening")
    for changed, remembered in ((0, {0, 3}), (1, set()), (2, set()), (4, {3, 4})):
        engine = Engine()
        engine.serve(prepare(talk(5), [], [], 0), harness, "")
        other = [*talk(5, 3, changed), message(5, "more")]
        plan = engine.serve(prepare(other, [], [], 1), harness, "")
        assert {i for read in engine.reads[-1] for i in read} - shown(other) == remembered
        assert plan.reason is (Reason.SPLICED if remembered else Reason.UNNAMED_SESSION)


def test_a_session_that_gets_a_name_keeps_what_its_caller_has() -> None:
    """Turns that another conversation may have had are no sources any more, but what they held can
    still be forgotten."""
    session = after_turn(after_turn(blank("s"), history(1)), history(2, task="Another task."))
    named = session.take_name("named", list(map(fingerprint, history(3))))
    assert (named.key, len(session.turns), len(named.turns)) == ("named", 2, 1)
    assert named.turns == session.turns[:1]
    (gone,) = session.turns[1:]
    assert named.departed.messages.keys() >= {gone.prepared.client_fingerprints[1]}
    assert named.take_name("named", []) is named
