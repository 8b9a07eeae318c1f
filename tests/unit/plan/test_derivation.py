"""Texts that are derived from what is forgotten, against an independent model of who read what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from support.sessions import after_turn, blank, history, pipeline, render

from leyline_engine.contract import Outcome, output_span
from leyline_proxy.edits.prepare import prepare
from leyline_proxy.model.derived import MAX_LISTED, Derived, derived_from
from leyline_proxy.model.readings import MAX_READ, MAX_RUNS, MAX_TEXTS, Readings, Runs, Text
from leyline_proxy.model.readings import _extended as extended
from leyline_proxy.model.session import Session
from leyline_proxy.model.spans import SpanName, SpanNames
from leyline_proxy.model.verdicts import Verdict
from leyline_proxy.plan.derivation import derived_texts, readings_after
from leyline_proxy.plan.naming import name_spans
from leyline_proxy.plan.synthesis import TurnPlan


@dataclass(slots=True)
class Talk:
    """A session and its client, who remembers by text which turn read what."""

    session: Session = field(default_factory=lambda: blank("s"))
    messages: list[dict[str, Any]] = field(default_factory=list)
    read: list[set[str]] = field(default_factory=list)
    """Texts in the prompt of each turn, or in its KV."""
    answers: list[str] = field(default_factory=list)
    count: int = 0
    certain: bool = True
    """False if it isn't certain which messages are those of earlier turns."""

    def say(self, role: str) -> str:
        """Add a message with a text of its own."""
        text = self.text()
        self.messages.append({"role": role, "content": text})
        return text

    def text(self) -> str:
        """A text without a character of another one, or its message might be the other's."""
        self.count += 1
        first = 0x4E00 + 20 * self.count
        return "".join(map(chr, range(first, first + 20)))

    def turn(self, spec: str = "keep_all") -> None:
        """Send the list, and note what its answer has read."""
        answer = self.text()
        self.session = after_turn(self.session, self.messages, spec, answer)
        shown = {message["content"] for message in self.messages}
        if self.session.turns[-1].lineage:
            shown = shown.union(*self.read)
        self.read.append(shown)
        self.answers.append(answer)

    @property
    def next(self) -> str:
        """The name of the next turn."""
        return f"t{self.session.next_index}-next"

    def forget(self, texts: Sequence[str], **plan: Any) -> Derived:
        """The texts that are derived from messages, as the next turn's account names them.

        Args:
            plan: of the next turn, beside the forget.
        """
        spec = "redact:pattern='" + "|".join(texts) + "'"
        prepared = prepare(self.messages, pipeline(spec), (), self.session.next_index)
        rendered = render(prepared.messages)
        turns, departed = self.session.turns, self.session.departed
        names = name_spans(self.next, prepared, turns, departed, rendered)
        found = derived_texts(
            TurnPlan(forget=("any",), **plan),
            prepared,
            names,
            self.session,
            turn=self.next,
            index=self.session.next_index,
        )
        assert found is not None
        formers = [name.former for name in names.client]
        formers += [text.former for text in self.session.readings.texts]
        self.certain = not any(formers)
        return found

    def derived(self, texts: Sequence[str]) -> dict[str, str]:
        """The answers that are derived from texts, by the model."""
        found: dict[str, str] = {}
        for answer, read in zip(self.answers, self.read, strict=True):
            if not read.isdisjoint(texts):
                found[answer] = "direct"
            elif not read.isdisjoint(found):
                found[answer] = "transitive"
        return {answer: how for answer, how in found.items() if answer not in texts}


STEPS = st.lists(
    st.tuples(st.integers(1, 2), st.none() | st.integers(0, 20), st.booleans()),
    min_size=1,
    max_size=7,
)
"""Turns: new messages, one that is left out, and whether the client keeps the answer, or has one
from elsewhere besides."""


def play(steps: Sequence[tuple[int, int | None, bool]], *, strangers: bool = False) -> Talk:
    """A session whose client leaves messages and answers out; its last list is yet to be sent."""
    talk = Talk()
    talk.say("system")
    for new, gone, flag in steps:
        for _ in range(new):
            talk.say("user")
        talk.turn()
        if gone is not None and len(talk.messages) > 3:
            del talk.messages[1 + gone % (len(talk.messages) - 2)]
        if strangers or flag:
            talk.messages.append({"role": "assistant", "content": talk.answers[-1]})
        if strangers and flag:
            talk.say("user")
            talk.say("assistant")
    talk.say("user")
    return talk


def by_answer(talk: Talk, found: Derived) -> dict[str, str]:
    """The relation of each named answer, without the one to come."""
    outputs = {output_span(f"t{n}-{size}"): n for n, size in enumerate(sizes(talk))}
    return {talk.answers[outputs[e.span]]: e.read for e in found.texts if e.span in outputs}


def sizes(talk: Talk) -> list[int]:
    """The lengths of the turns' lists, which their names have."""
    return [int(summary.turn.partition("-")[2]) for summary in talk.session.history]


@given(STEPS, st.sets(st.integers(0, 20), min_size=1, max_size=2))
def test_every_text_that_read_it_is_named(
    steps: Sequence[tuple[int, int | None, bool]], picks: set[int]
) -> None:
    """Exactly the answers whose turn held a forgotten message, or a text that is derived itself,
    are named, with their place in the list; the answer to come is among them. If it isn't certain
    which message is meant, there may be more."""
    talk = play(steps)
    shown = [message["content"] for message in talk.messages[1:]]
    chosen = sorted({shown[pick % len(shown)] for pick in picks})
    found = talk.forget(chosen)
    expected = talk.derived(chosen)
    assert by_answer(talk, found).keys() >= expected.keys()
    places = {m["content"]: at for at, m in enumerate(talk.messages)}
    named = {e.message for e in found.texts}
    assert named >= {places[answer] for answer in expected.keys() & places.keys()}
    if not talk.certain:
        return
    assert by_answer(talk, found) == expected
    own = {e.span: e for e in found.texts}.pop(output_span(talk.next), None)
    assert (own is not None) == bool(expected.keys() & set(shown))
    assert own is None or own.read == "transitive"
    assert [e.message for e in found.texts if e is not own] == [
        places.get(answer) for answer in expected
    ]
    assert found.complete


@given(STEPS, st.integers(0, 20))
def test_texts_of_unknown_authors_are_never_left_out(
    steps: Sequence[tuple[int, int | None, bool]], pick: int
) -> None:
    """A message of the model's that no turn here wrote, and that came later, is named; then the
    list isn't complete."""
    talk = play(steps, strangers=True)
    users = [at for at, m in enumerate(talk.messages) if m["role"] == "user"]
    place = users[pick % len(users)]
    secret = talk.messages[place]["content"]
    found = talk.forget([secret])
    assert by_answer(talk, found).keys() >= talk.derived([secret]).keys()
    named = {each.message for each in found.texts}
    strange = {
        at
        for at, message in enumerate(talk.messages)
        if message["role"] == "assistant" and message["content"] not in talk.answers and at > place
    }
    assert named >= strange
    # Otherwise, it may be an answer that is known.
    assert not (strange and talk.certain and found.complete)


def test_texts_that_are_forgotten_already_are_not_named() -> None:
    """A text that an earlier turn or the same one forgets is left out, but what read it isn't."""
    talk = Talk()
    secret = talk.say("user")
    for _ in range(3):
        talk.turn()
        talk.messages.append({"role": "assistant", "content": talk.answers[-1]})
        talk.say("user")
    assert len(by_answer(talk, talk.forget([secret]))) == 3
    both = by_answer(talk, talk.forget([secret, talk.answers[1]]))
    assert both.keys() == {talk.answers[0], talk.answers[2]}
    names = {output_span(talk.session.turns[1].turn)}
    known = replace(talk.session, readings=talk.session.readings.forget(names))
    talk.session = known
    assert by_answer(talk, talk.forget([secret])).keys() == {talk.answers[0], talk.answers[2]}
    only = derived_from(known.readings, names, None)
    assert [each.span for each in only.texts] == [output_span(known.turns[2].turn)]


def test_a_text_for_a_policy_is_named_while_it_is_kept() -> None:
    """A text that a model wrote for a policy from a turn's messages has read what that turn had;
    one that no policy uses any more is left out."""
    talk = Talk()
    secret = talk.say("user")
    talk.turn()
    turn = talk.session.turns[0].turn
    written = talk.session.readings.written("w-1", turn, "0.key")
    seeds = {talk.session.turns[0].names.client[0].id}
    kept = derived_from(written, seeds, None, kept={"0.key"})
    assert [(e.span, e.role, e.read) for e in kept.texts][1:] == [("w-1", "policy", "direct")]
    assert kept.complete
    assert len(derived_from(written, seeds, None).texts) == 1
    lost = talk.session.readings.written("w-1", "t7-unknown", "0.key")
    assert not derived_from(lost, seeds, None).complete
    assert secret


def test_a_turn_without_a_name_for_its_text_is_not_forgotten() -> None:
    """Messages before a turn whose text isn't known have no complete list, and later ones have."""
    talk = Talk()
    first = talk.say("user")
    talk.turn()
    talk.session = replace(talk.session, readings=talk.session.readings.lose(0))
    second = talk.say("user")
    talk.turn()
    talk.say("user")
    assert not talk.forget([first]).complete
    assert talk.forget([second]).complete
    gone = talk.session.without_text()
    assert not derived_from(gone.readings, {f"t{gone.next_index}-x.1"}, None).complete
    assert not derived_from(Readings(), {"*"}, None).complete


def test_readings_are_bounded() -> None:
    """Texts, messages and runs have limits; where a limit takes something, the list says that it
    isn't complete."""
    texts = tuple(Text(f"t{n}-a.out", n) for n in range(MAX_TEXTS + 5))
    many = Readings(texts, {"t0-a.0": ((0, MAX_TEXTS + 5),)})._bounded()
    assert (len(many.texts), many.before) == (MAX_TEXTS, 5)
    found = derived_from(many, {"t0-a.0"}, None)
    assert not found.complete
    account = found.account()
    assert len(account["derived"]) == MAX_LISTED
    assert account["derived_omitted"] == MAX_TEXTS - MAX_LISTED
    assert derived_from(many, {"t5-a.0"}, None).complete
    read = {f"t{n}-a.0": ((n, n + 1),) for n in range(MAX_READ + 1)}
    fewer = Readings((), read)._bounded()
    assert len(fewer.read) <= MAX_READ
    assert (
        fewer.before
        == max(set(range(MAX_READ + 1)) - {runs[0][0] for runs in fewer.read.values()}) + 1
    )
    talk = Talk()
    opening = talk.say("user")
    asides = [talk.say("user")]
    for _ in range(2 * MAX_RUNS + 4):
        talk.turn()
        if len(talk.messages) > 1:
            asides.append(talk.messages.pop(1)["content"])
        else:
            talk.messages.append({"role": "user", "content": asides[0]})
    assert max(map(len, talk.session.readings.read.values())) <= MAX_RUNS
    assert opening


def test_more_runs_than_are_kept_are_one() -> None:
    """Every turn that read a message is in a run, also where turns between them are taken in."""
    runs: Runs = ()
    turns = range(0, 4 * MAX_RUNS, 2)
    for turn in turns:
        runs = extended(runs, turn)
        assert len(runs) <= MAX_RUNS
    assert all(any(first <= turn < end for first, end in runs) for turn in turns)


def test_a_turn_under_way_may_write_from_it() -> None:
    """While another turn of the session is under way, or the text is out of reach, nobody knows all
    texts."""
    talk = Talk()
    secret = talk.say("user")
    talk.turn()
    talk.say("user")
    assert talk.forget([secret]).complete
    assert not talk.forget([secret], unreachable=True).complete
    talk.session = replace(talk.session, in_flight=frozenset({"t1-other"}))
    found = talk.forget([secret])
    assert [each.span for each in found.texts] == [output_span(talk.session.turns[0].turn)]
    assert not found.complete


def test_a_splice_may_have_read_derived_texts_that_are_gone() -> None:
    """The answer of a spliced turn is named, as KV in its prompt may have read a derived text that
    its list lacks; a prefill's isn't."""
    talk = Talk()
    secret = talk.say("user")
    talk.turn()
    talk.messages.append({"role": "assistant", "content": talk.answers[0]})
    talk.say("user")
    talk.turn()
    del talk.messages[1]
    own = output_span(talk.next)
    spliced = {
        each.span: each.read for each in talk.forget([secret], planned=Outcome.SPLICED).texts
    }
    assert spliced[own] == "transitive"
    prefilled = talk.forget([secret], planned=Outcome.REPREFILLED).texts
    assert own not in {each.span for each in prefilled}


SECRET, FIRST, SECOND = "t0-a.1", "t0-a.out", "t1-b.out"


def relations(texts: Sequence[Text], read: Mapping[str, Runs], **demand: Any) -> dict[str, str]:
    """The named texts of a session that forgets the secret of its first turn."""
    found = derived_from(Readings(tuple(texts), read), {SECRET}, None, **demand)
    return {each.span: each.read for each in found.texts}


def test_the_nearest_relation_counts() -> None:
    """A message that was one of two texts is as near as the nearer one; what reads a text of an
    unknown author has no known author either."""
    answers = (Text(FIRST, 0), Text(SECOND, 1))
    read: dict[str, Runs] = {SECRET: ((0, 1),), FIRST: ((1, 2),)}
    retold = Text("t2-c.3", 2, "message", former=(FIRST, SECOND))
    found = relations((*answers, retold), read)
    assert found == {FIRST: "direct", SECOND: "transitive", "t2-c.3": "direct"}
    strange = Text("t1-b.3", 1, "message")
    after = Text("t2-c.out", 2)
    found = relations((strange, after), {SECRET: ((0, 1),), "t1-b.3": ((2, 3),)})
    assert found == {"t1-b.3": "unknown", "t2-c.out": "unknown"}


def test_a_client_s_message_may_be_an_earlier_answer() -> None:
    """Whatever its role: a message that may have been a derived text is one."""
    prepared = prepare([{"role": "user", "content": "retold"}], pipeline("keep_all"), (), 1)
    names = SpanNames((SpanName("t1-b.0", (FIRST,)),), (("t1-b.0",),))
    before = Readings((Text(FIRST, 0),), {SECRET: ((0, 1),)})
    after = before.after("t1-b", 1, prepared, names, hidden=False)
    found = {each.span: each.read for each in derived_from(after, {SECRET}, names).texts}
    assert found == {FIRST: "direct", "t1-b.0": "direct", SECOND: "transitive"}


def test_a_message_in_front_of_the_secret_was_written_without_it() -> None:
    """Of two messages of one turn, only the later one may have been written from the other."""
    strange = Readings((Text("t0-a.3", 0, "message"),))
    assert derived_from(strange, {"t0-a.2"}, None).texts
    assert not derived_from(strange, {"t0-a.4"}, None).texts
    assert not derived_from(strange, {"t0-a.out"}, None).texts


def test_a_text_for_a_policy_has_read_what_its_turn_s_answer_had() -> None:
    """Also by KV that remembers more than the prompt shows, as after a splice."""
    for hidden in (True, False):
        texts = (Text(FIRST, 0), Text(SECOND, 1, hidden=hidden))
        readings = Readings(texts, {SECRET: ((0, 1),)}).written("w-1", "t1-b", "0.key")
        found = derived_from(readings, {SECRET}, None, kept={"0.key"}).texts
        assert ("w-1" in {each.span for each in found}) == hidden


def test_the_turn_that_forgets_reads_nothing_of_it() -> None:
    """Its answer isn't derived from texts that it forgets itself, but from those that it keeps."""
    texts = (Text(FIRST, 0), Text(SECOND, 1))
    read: dict[str, Runs] = {SECRET: ((0, 2),), FIRST: ((1, 2),)}
    assert relations(texts, read, also={SECRET, FIRST}, now=1) == {}
    assert relations(texts, read, also={SECRET}, now=1) == {FIRST: "direct", SECOND: "transitive"}


def test_texts_that_turns_forgot_or_that_are_in_quarantine_are_not_named() -> None:
    """A turn's demand is noted with its readings, and the session's verdicts count as well."""
    talk = Talk()
    secret = talk.say("user")
    for _ in range(2):
        talk.turn()
        talk.messages.append({"role": "assistant", "content": talk.answers[-1]})
        talk.say("user")
    first, second = (output_span(turn.turn) for turn in talk.session.turns)
    before = talk.session
    verdict = Verdict((first,), (), "quarantine", "verdict", "api")
    talk.session = replace(before, verdicts=(verdict,))
    assert {each.span for each in talk.forget([secret]).texts} >= {second}
    assert first not in {each.span for each in talk.forget([secret]).texts}
    talk.session = before
    talk.turn(f"redact:pattern='{talk.answers[0]}'")
    known = talk.session.readings.knows(first)
    assert known is not None and known.forgotten
    assert first not in {each.span for each in talk.forget([secret]).texts}


def test_a_stub_of_a_quarantine_is_not_read() -> None:
    """A turn whose prompt has a stub in a message's place has not read it, unlike one whose prompt
    has a part of it."""
    session = after_turn(blank("s"), history(1), "quarantine:rules=[],patterns=['result 0']")
    name = session.turns[0].names.client[3].id
    assert session.turns[0].prepared.quarantined.keys() == {3}
    assert name not in session.readings.read
    session = after_turn(session, history(1), "redact:pattern='result 0'")
    assert session.readings.read[name] == ((1, 2),)


def test_a_turn_that_is_not_retained_leaves_later_names_unknown() -> None:
    """Its messages come under new names with the next turn, so the texts of neither are all
    known; a turn without tokens keeps its names, and only its own text is unknown."""
    talk = Talk()
    talk.say("user")
    talk.turn()
    turn = talk.session.turns[0]
    for retained, answers, before in ((True, True, 0), (True, False, 2), (False, True, 3)):
        after = readings_after(
            talk.session,
            "t1-x",
            turn.prepared,
            turn.names,
            hidden=False,
            retained=retained,
            answers=answers,
        ).readings
        assert after.before == before
        assert (after.knows("t1-x.out") is not None) == (retained and answers)
        assert after.read[turn.names.client[0].id] == ((0, 2),)
    lost = readings_after(
        talk.session, "t1-x", turn.prepared, None, hidden=False, retained=False, answers=False
    )
    assert lost.readings.before == 3
