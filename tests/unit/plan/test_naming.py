"""Names of messages in the engine's ledger: stable, never another's, and complete when it counts.

Each message of these conversations names itself in its own text, so the judge needs no diff.
"""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass, field, replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.character_turns import render as characters

from leyline_engine.contract import Mode, Outcome, output_span, token_digest
from leyline_policies import Policy
from leyline_proxy.edits.prepare import prepare
from leyline_proxy.model.messages import Message
from leyline_proxy.model.prepared import Prepared
from leyline_proxy.model.rendered import MessageSpan, Rendered
from leyline_proxy.model.session import MAX_DEPARTED, RetainedTurn, Session, TurnSummary
from leyline_proxy.model.spans import ANYTHING, SpanNames, outer_extents, span_labels
from leyline_proxy.plan.forgetting import is_unreachable, new_demands, spans_to_forget
from leyline_proxy.plan.naming import MAX_FORMER, name_spans
from leyline_proxy.request.declared import DeclaredEdit

RETAINED = 3
render = partial(characters, unlocated=("system",))
STEPS = ("append", "append", "edit", "drop", "again", "branch", "move")


def text(number: int, version: int = 0) -> str:
    """A text that names its message, half of which an edit leaves alone."""
    words = random.Random(number)
    body = " ".join(f"{words.randrange(10**6)}" for _ in range(6))
    return f"[{number}] {body} {'' if version == 0 else f'edit {version}'}"


def number_of(message: Message) -> int:
    """The number in the message's text."""
    return int(message["content"].partition("]")[0][1:])


@dataclass
class Drop:
    """A policy that drops or shortens some messages."""

    dropped: set[int] = field(default_factory=set)
    shortened: set[int] = field(default_factory=set)
    name: str = "window"
    mode: str = "amortize"

    def transform(self, messages: list[Message], turn_idx: int) -> list[Message]:
        """Window."""
        return [
            {**m, "content": m["content"][:12]} if number_of(m) in self.shortened else m
            for m in messages
            if number_of(m) not in self.dropped
        ]


class Talk:
    """A session as the proxy keeps it, and the truth about it."""

    def __init__(self) -> None:
        self.session = Session("s", "t", "", (), (), 0, 0.0)
        self.denoted: dict[str, int] = {}
        """The message that a name was given to."""
        self.labels: dict[int, set[str]] = {}
        """Names under which the engine was given a message's text, answers included."""

    def prepared(self, messages: list[Message], policies: list[Policy] = []) -> Prepared:  # noqa: B006
        """The turn's lists."""
        return prepare(messages, policies, [], self.session.next_index)

    def names(self, prepared: Prepared) -> tuple[str, SpanNames]:
        """The turn's name and those of its messages."""
        turn = f"t{self.session.next_index}"
        prompt = render(prepared.messages)
        session = self.session
        return turn, name_spans(turn, prepared, session.turns, session.departed, prompt)

    def send(self, prepared: Prepared, output: Message | None = None) -> RetainedTurn:
        """One turn, answered with ``output``."""
        turn, names = self.names(prepared)
        rendered = render(prepared.messages)
        outputs = tuple(map(ord, f"{output['content']}</>")) if output else ()
        digest = token_digest([*rendered.tokens, *outputs])
        kept = RetainedTurn(
            turn, 0, prepared, rendered, outputs, (), None, digest, "m", names=names
        )
        for place, message in enumerate(prepared.client):
            who = number_of(message)
            assert self.denoted.setdefault(names.client[place].id, who) == who
        for place, message in enumerate(prepared.client):
            if message["content"][:4] in {entry.message["content"][:4] for entry in prepared.sent}:
                self.labels.setdefault(number_of(message), set()).add(names.client[place].id)
        if output is not None:
            self.denoted[output_span(turn)] = number_of(output)
            self.labels.setdefault(number_of(output), set()).add(output_span(turn))
        summary = TurnSummary(self.session.next_index, turn, 0.0, Outcome.UNEDITED, None, (), None)
        self.session = self.session.retain(kept, summary, keep=RETAINED, now=0.0)
        return kept


@st.composite
def walks(draw: st.DrawFn) -> list[tuple[list[Message], Message | None, Drop]]:
    """Client lists of successive turns, their answers, and what a policy did to them."""
    count = 0

    def fresh(role: str) -> Message:
        nonlocal count
        count += 1
        return {"role": role, "content": text(count)}

    current = [fresh("system"), fresh("user")]
    ever: dict[int, Message] = {}
    lists: list[list[Message]] = []
    result: list[tuple[list[Message], Message | None, Drop]] = []
    version = 0
    for _ in range(draw(st.integers(2, 9))):
        last = {"role": "user", "content": current[-1]["content"]}
        turn = [*current[:-1], {**last, "role": current[-1]["role"]}]
        victims = [number_of(m) for m in turn[2:-1]]
        chosen = draw(st.lists(st.sampled_from(victims), max_size=2)) if victims else []
        policy = Drop(set(chosen[:1]), set(chosen[1:]))
        answer = fresh("assistant") if draw(st.booleans()) else None
        result.append((turn, answer, policy))
        lists.append(turn)
        ever |= {number_of(m): m for m in turn}
        current = [*turn, *([answer] if answer else []), fresh("user")]
        steps = draw(st.lists(st.sampled_from(STEPS), max_size=2))
        if "edit" in steps:  # text that is moved and rewritten at once can only be a new message
            steps = [step for step in steps if step in ("append", "drop", "edit")]
        for step in steps:
            place = draw(st.integers(1, len(current) - 1))
            if step == "append":
                current.append(fresh(draw(st.sampled_from(["user", "assistant"]))))
            elif step == "edit":
                version += 1
                old = current[place]
                current[place] = {**old, "content": text(number_of(old), version)}
            elif step == "drop" and len(current) > 3:
                del current[place]
            elif step == "again":
                present = {number_of(m) for m in current}
                gone = [m for who, m in ever.items() if who not in present]
                if gone:
                    current.insert(place, draw(st.sampled_from(gone)))
            elif step == "branch":
                current = [*draw(st.sampled_from(lists)), fresh("assistant"), fresh("user")]
            elif step == "move" and place > 1:
                current.insert(1, current.pop(place))
        if current[-1]["role"] != "user":
            current.append(fresh("user"))
    return result


@given(walks())
def test_a_name_denotes_one_message(walk: list[tuple[list[Message], Message | None, Drop]]) -> None:
    """Through edits, drops, returns, branches and policies, no name ever changes its bearer."""
    talk = Talk()
    for messages, answer, policy in walk:
        kept = talk.send(talk.prepared(messages, [policy]), answer)
        ids = [name.id for name in kept.names.client]
        assert len(ids) == len(set(ids))
        assert len(kept.names.sent) == len(kept.prepared.sent)


@given(walks(), st.data())
def test_a_forget_names_all_that_a_message_was_called(
    walk: list[tuple[list[Message], Message | None, Drop]], data: st.DataObject
) -> None:
    """A later demand reaches the name of whatever turn gave the engine a message's text, and no
    name of a message beside it in the list."""
    talk = Talk()
    for messages, answer, policy in walk[:-1]:
        talk.send(talk.prepared(messages, [policy]), answer)
    messages = walk[-1][0]
    place = data.draw(st.integers(0, len(messages) - 1))
    edit = DeclaredEdit(message=place, replacement="[gone]", mode=Mode.FORGET)
    prepared = prepare(messages, [], [edit], len(walk))
    turn, names = talk.names(prepared)
    forget = spans_to_forget(turn, prepared, names, talk.session, named=True)
    known = talk.labels.get(number_of(messages[place]), set())
    assert known <= set(forget)
    others = {name.id for other, name in enumerate(names.client) if other != place}
    assert not others & set(forget)
    assert not any(name == ANYTHING or name.startswith(f"{turn}.") for name in forget)


@given(walks())
def test_labels_cover_the_prompt(walk: list[tuple[list[Message], Message | None, Drop]]) -> None:
    """Labels are sorted, leave no token out, and hold each content whole; so for kept messages the
    tokens under a name are the source's tokens under it."""
    talk = Talk()
    contents: dict[str, str] = {}
    for messages, answer, policy in walk:
        kept = talk.send(talk.prepared(messages, [policy]), answer)
        labels = span_labels(kept.rendered, kept.names.sent)
        assert [label.start for label in labels] == sorted(label.start for label in labels)
        covered = 0
        for label in labels:
            assert label.start <= covered
            covered = max(covered, label.end)
        assert covered == len(kept.rendered.tokens)
        bearers = {number_of(m): place for place, m in enumerate(kept.prepared.client)}
        for span in kept.rendered.spans:
            tokens = "".join(map(chr, kept.rendered.tokens[span.start : span.end]))
            own = kept.names.client[bearers[number_of({"content": tokens})]].id
            extents = [(label.start, label.end) for label in labels if label.span == own]
            assert any(start <= span.start and span.end <= end for start, end in extents)
            assert contents.setdefault(own, tokens[:8]) == tokens[:8]


def turns_of(*lists: list[Message], outputs: list[str] | None = None) -> Talk:
    """A session that sent these lists."""
    talk = Talk()
    for index, messages in enumerate(lists):
        said = (outputs or [])[index : index + 1]
        answer = {"role": "assistant", "content": said[0]} if said and said[0] else None
        talk.send(talk.prepared(messages), answer)
    return talk


def user(number: int, version: int = 0) -> Message:
    """A user's message."""
    return {"role": "user", "content": text(number, version)}


def assistant(number: int, version: int = 0) -> Message:
    """An assistant's message."""
    return {"role": "assistant", "content": text(number, version)}


def test_an_answer_has_the_engines_name() -> None:
    """The text after a turn's list is the engine's own generated answer."""
    talk = turns_of([user(1)], outputs=[text(2)])
    _, names = talk.names(talk.prepared([user(1), assistant(2), user(3)]))
    assert [name.id for name in names.client] == ["t0.0", "t0.out", "t1.2"]


def test_a_regenerated_answer_is_the_one_that_goes_on() -> None:
    """Of two answers to one list, the tokens show which was taken; both are named in doubt."""
    talk = turns_of([user(1)], [user(1)], outputs=[text(2), text(4)])
    _, names = talk.names(talk.prepared([user(1), assistant(2), user(3)]))
    assert (names.client[1].id, names.client[1].former) == ("t0.out", ("t1.out",))
    _, names = talk.names(talk.prepared([user(1), assistant(9), user(3)]))
    assert names.client[1].id == "t2.1"
    assert set(names.client[1].former) == {"t0.out", "t1.out"}


def test_a_rewritten_message_keeps_its_name() -> None:
    """Half of the text is evidence enough; a wholly other text is new, and may have been it."""
    talk = turns_of([user(1), user(2), user(3)])
    _, names = talk.names(talk.prepared([user(1), user(2, version=1), user(3)]))
    assert names.client[1].id == "t0.1"
    _, names = talk.names(talk.prepared([user(1), user(7), user(3)]))
    assert (names.client[1].id, names.client[1].former) == ("t1.1", ("t0.1",))


def test_a_name_outlives_a_policy_that_drops_the_message() -> None:
    """Dropped for some turns, sent again, and still the same."""
    talk = Talk()
    lists = [user(1), user(2), user(3)]
    for dropped in (set(), {2}, {2}, {2}, {2}, set()):
        kept = talk.send(talk.prepared(lists, [Drop(dropped)]))
    assert list(kept.names.sent) == [("t0.0",), ("t0.1",), ("t0.2",)]


def test_what_a_policy_writes_answers_for_what_it_drops() -> None:
    """A summary may retell the messages that it replaces."""

    class Summarize:
        name, mode = "summarize", "amortize"

        def transform(self, messages: list[Message], turn_idx: int) -> list[Message]:
            return [messages[0], user(50), *messages[3:]]

    talk = Talk()
    lists = [user(1), assistant(2), user(3), user(4)]
    first = talk.send(talk.prepared(lists, [Summarize()]))
    assert {"t0.1", "t0.2"} <= set(first.names.sent[1])
    second = talk.send(talk.prepared([*lists, user(5)], [Summarize()]))
    assert second.names.sent[1] == first.names.sent[1]
    edit = DeclaredEdit(message=1, drop=True, mode=Mode.FORGET)
    prepared = prepare(lists, [], [edit], 2)
    turn, names = talk.names(prepared)
    assert spans_to_forget(turn, prepared, names, talk.session, named=True) == ("t0.1",)


def test_a_message_that_the_caller_dropped_long_ago_is_found() -> None:
    """Its names outlast the turns that held it."""
    without = [user(1), user(3)]
    talk = turns_of([user(1), user(2), user(3)], *[without] * (RETAINED + 1))
    edit = DeclaredEdit(message=1, replacement="[gone]", mode=Mode.FORGET)
    prepared = prepare([user(1), user(2), user(3)], [], [edit], 9)
    turn, names = talk.names(prepared)
    assert "t0.1" in spans_to_forget(turn, prepared, names, talk.session, named=True)


def redacted(talk: Talk, messages: list[Message]) -> tuple[Prepared, tuple[str, ...]]:
    """A turn that redacts its last message, and what it forgets."""
    edit = DeclaredEdit(message=len(messages) - 1, replacement="[gone]", mode=Mode.FORGET)
    prepared = prepare(messages, [], [edit], 1)
    turn, names = talk.names(prepared)
    return prepared, spans_to_forget(turn, prepared, names, talk.session, named=True)


def test_a_new_message_needs_no_forget() -> None:
    """Nothing has read it; only where the account has a hole, anything may have."""
    talk = turns_of([user(1)], outputs=[text(2)])
    messages = [user(1), assistant(2), user(3)]
    assert redacted(talk, messages)[1] == ()
    talk.session = talk.session.lose_turn()
    assert redacted(talk, messages)[1] == (ANYTHING,)


def test_a_demand_that_was_met_is_no_new_one() -> None:
    """The turn that forgot is the only source left, and later ones repeat nothing."""
    talk = turns_of([user(1), user(2)])
    prepared, forget = redacted(talk, [user(1), user(2)])
    assert forget == ("t0.1",)
    talk.session = talk.session.forget_sources()
    talk.send(prepared)
    assert redacted(talk, [user(1), user(2)])[1] == ()


def test_a_demand_that_reached_everything_was_met_too() -> None:
    """Names that were too many to list are not asked for again and again."""
    olds = [user(number) for number in range(10, 10 + MAX_FORMER + 1)]
    talk = turns_of([user(1), *olds])
    prepared, forget = redacted(talk, [user(1), user(5000)])
    assert forget == (ANYTHING,)
    source = talk.send(prepared)
    talk.session = replace(talk.session, turns=(source,))
    later, forget = redacted(talk, [user(1), user(5000)])
    _, names = talk.names(later)
    assert names.client[1].former == (ANYTHING,)
    assert (forget, new_demands(source, later, names)) == ((), ())


UNKNOWN = Session("", "", "", (), (), 0, 0)


def unknown(messages: list[Message], *, named: bool) -> tuple[tuple[str, ...], bool]:
    """The forgets of a session's first request that redacts its first message, and if some of it
    can't be reached."""
    edit = DeclaredEdit(message=0, replacement="[gone]", mode=Mode.FORGET)
    prepared = prepare(messages, [], [edit], 0)
    names = name_spans("t0-a", prepared, (), UNKNOWN.departed, None)
    forget = spans_to_forget("t0-a", prepared, names, None, named=named)
    return forget, is_unreachable(prepared, names, None, traced=named)


@pytest.mark.parametrize("messages", [[user(1)], [user(1), assistant(2), user(3)]])
def test_a_name_that_the_proxy_does_not_know_may_have_been_in_use(messages: list[Message]) -> None:
    """It may even before its first answer: the same request may have been sent with the secret in
    it."""
    assert unknown(messages, named=True) == ((ANYTHING,), False)


def test_an_unknown_conversation_without_a_name_is_unreachable() -> None:
    """Nothing lies under an id that the proxy has just made up; an engine holds a conversation
    under way under an unknown id."""
    assert unknown([user(1), assistant(2), user(3)], named=False) == ((), True)
    assert unknown([user(1)], named=False) == ((), False)


def reaches(talk: Talk, messages: list[Message], place: int) -> bool:
    """Return True if a redaction of that message reaches all that may hold it."""
    edit = DeclaredEdit(message=place, replacement="[gone]", mode=Mode.FORGET)
    prepared = prepare(messages, [], [edit], 1)
    _, names = talk.names(prepared)
    return not is_unreachable(prepared, names, talk.session, traced=False)


def test_what_lies_untraced_is_unreachable_and_what_came_later_is_not() -> None:
    """This holds on every later turn, until the demand has been reported once."""
    opening = [user(1), assistant(2), user(3)]
    talk = turns_of(opening)
    talk.session = replace(talk.session, untraced=1)
    later = [*opening, assistant(4), user(5)]
    assert not reaches(talk, later, 0)
    assert not reaches(talk, later, 2)
    assert reaches(talk, later, 4)
    edit = DeclaredEdit(message=0, replacement="[gone]", mode=Mode.FORGET)
    talk.send(prepare(later, [], [edit], 1))
    talk.session = replace(talk.session, turns=talk.session.turns[-1:])
    assert reaches(talk, later, 0), "the demand was told with the turn that made it"
    assert reaches(talk, later, 4)
    talk.session = replace(talk.session, untraced=2)
    assert not reaches(talk, later, 4)
    talk.session = replace(talk.session, untraced=0)
    assert reaches(talk, later, 2)


def test_a_demand_beside_a_turn_under_way_reaches_everything() -> None:
    """The other request may have brought the message; once the demand is met, it isn't repeated."""
    talk = turns_of([user(1)], outputs=[text(2)])
    messages = [user(1), assistant(2), user(3)]
    talk.session = replace(talk.session, in_flight=frozenset({"t1-b"}))
    prepared, forget = redacted(talk, messages)
    assert forget == (ANYTHING,)
    talk.send(prepared)
    assert redacted(talk, messages)[1] == ()


def test_losses_are_made_good_by_forgetting_everything() -> None:
    """Only those that were known when everything was forgotten are."""
    session = turns_of([user(1)]).session.lose_turn().lose_turn()
    assert session.account_for(2).unnamed == 0
    assert session.lose_turn().account_for(2).unnamed == 1


def test_too_many_names_are_anything() -> None:
    """Lists that no bound could hold are reported as reaching everything."""
    olds = [user(number) for number in range(10, 10 + MAX_FORMER + 1)]
    talk = turns_of([user(1), *olds, user(2)])
    _, names = talk.names(talk.prepared([user(1), user(5000), user(2)]))
    assert names.client[1].former == (ANYTHING,)
    session = talk.session
    for number in range(MAX_DEPARTED // len(olds) + RETAINED + 1):
        moved = [user(number * 1000 + 5000 + at) for at in range(len(olds))]
        talk.send(talk.prepared(moved))
    assert session.unnamed == 0 < talk.session.unnamed


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_extents_reach_to_the_neighbours(order: tuple[int, ...]) -> None:
    """Glue belongs to both sides; what can't be located may be anywhere in its gap."""
    spans = tuple(
        MessageSpan(message, 10 + 20 * at, 20 + 20 * at) for at, message in enumerate(order)
    )
    prompt = Rendered(array("q", range(100)), spans)
    extents = outer_extents(prompt, 4)
    assert [extents[message] for message in order] == [(0, 30), (20, 50), (40, 100)]
    assert extents[3] == ((60, 100) if order == (0, 1, 2) else (0, 100))
    nowhere = replace(prompt, spans=())
    assert outer_extents(nowhere, 2) == [(0, 100), (0, 100)]
