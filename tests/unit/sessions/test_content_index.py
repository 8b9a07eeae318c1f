"""The index of contents: who has them on which engine, for how long, and for whom."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from support.sessions import after_turn, blank

from leyline_engine.contract import SourceRef
from leyline_proxy.model.messages import Message
from leyline_proxy.model.rendered import MessageSpan, Rendered
from leyline_proxy.model.session import Session
from leyline_proxy.sessions.contents import MAX_HOLDERS, MIN_CONTENT, ContentIndex, ContentPlace

TEXT = "The file holds many lines of settings."


def result(text: str, call: str) -> Message:
    """A message with what a tool found, for a call."""
    return {"role": "user", "content": text, "name": call}


def played(*texts: str, session: str = "one", tenant: str = "t") -> Session:
    """A session with a turn that shows these texts."""
    messages = [result(text, f"{session}-{number}") for number, text in enumerate(texts)]
    return after_turn(blank(session, tenant), messages)


def index_of(*sessions: Session) -> ContentIndex:
    """An index that has learnt these sessions."""
    index = ContentIndex()
    for session in sessions:
        index.note(session.tenant)
        index.put(session)
    return index


def places(index: ContentIndex, text: str, tenant: str = "t", run: str = "m") -> list[ContentPlace]:
    """The places of a text."""
    tokens = played("-" * 50, text).turns[0].rendered
    span = MessageSpan(1, *tokens.spans[1][1:])
    return index.places(tenant, run, tokens, span)


def test_a_text_is_found_in_the_turn_that_shows_it() -> None:
    """A place names the session, its turn, and the very tokens, whatever stands around them."""
    session = played("A task.", TEXT)
    (place,) = places(index_of(session), TEXT)
    (turn,) = session.turns
    assert place.source == SourceRef(turn.turn, len(turn.tokens), turn.digest, "one")
    assert "".join(map(chr, turn.tokens[place.start : place.end])) == TEXT
    assert places(index_of(session), TEXT[:-1]) == []


def test_tenants_and_engines_are_apart() -> None:
    """Neither another tenant's text nor one on another engine's run has a place."""
    index = index_of(played(TEXT), played("other " * 9, tenant="u"))
    assert places(index, TEXT, tenant="u") == []
    assert places(index, TEXT, run="m2") == []
    assert places(index, TEXT, tenant="nobody") == []


def test_only_tenants_that_ask_are_indexed() -> None:
    """A session of a tenant that never asked for reuse leaves nothing."""
    index = ContentIndex()
    index.put(played(TEXT))
    assert len(index) == 0


def test_texts_below_the_least_have_no_place() -> None:
    """Engines copy nothing so short."""
    short, long = TEXT[: MIN_CONTENT - 1], TEXT[:MIN_CONTENT]
    index = index_of(played(short, long))
    assert (len(places(index, short)), len(places(index, long))) == (0, 1)


def test_the_latest_session_comes_first_and_few_are_kept() -> None:
    """Of many sessions with one text, the latest have places."""
    names = [f"s{number}" for number in range(MAX_HOLDERS + 3)]
    index = index_of(*(played(TEXT, session=name) for name in names))
    assert [place.source.session for place in places(index, TEXT)] == names[:2:-1]
    assert len(index) == MAX_HOLDERS


def test_a_text_that_was_cut_stays_as_long_as_its_turn() -> None:
    """An older turn that is retained still has what the latest one has not."""
    session = played(TEXT, "Some other text that is long enough.")
    index = index_of(session)
    old = session.turns[0].turn
    for number in range(4):
        shown = [result("Some other text that is long enough.", "x")] * (number + 2)
        session = after_turn(session, shown)
        index.put(session)
        held = old in {turn.turn for turn in session.turns}
        assert [place.source.turn for place in places(index, TEXT)] == [old] * held
        (other,) = places(index, "Some other text that is long enough.")
        assert session.last is not None
        assert other.source.turn == session.last.turn
    assert not held


def test_a_session_that_lost_its_sources_has_no_places() -> None:
    """A forget removes them with the turns, and so does the end of the session."""
    session, other = played(TEXT), played(TEXT, session="two")
    index = index_of(session, other)
    index.put(session.forget_sources())
    assert [place.source.session for place in places(index, TEXT)] == ["two"]
    index.drop("t", "two")
    assert len(index) == 0
    index.drop("t", "two")
    index.drop("nobody", "two")


def test_turns_of_an_engine_that_retains_nothing_have_no_places() -> None:
    """A turn without tokens is known by its messages only."""
    session = played(TEXT)
    bare = replace(session.turns[0], rendered=Rendered(session.turns[0].tokens[:0], ()))
    assert len(index_of(replace(session, turns=(bare,)))) == 0


def test_the_tenant_with_the_most_loses_its_oldest_session() -> None:
    """A tenant that sends much takes no place from one that sends little."""
    index = ContentIndex(max_places=6)
    small = played(TEXT, tenant="small")
    index.note("small")
    index.put(small)
    index.note("t")
    for number in range(9):
        name = f"s{number}"
        texts = [f"{name} says {letter * 30}" for letter in "abc"]
        index.put(played(*texts, session=name))
        assert len(index) <= 6
    assert len(places(index, TEXT, tenant="small")) == 1
    assert places(index, f"s8 says {'a' * 30}") != []
    assert places(index, f"s0 says {'a' * 30}") == []


class IndexMachine(RuleBasedStateMachine):
    """Sessions that grow, forget and end, against a plain list of what they last showed."""

    def __init__(self) -> None:
        super().__init__()
        self.index = ContentIndex(max_places=12)
        self.sessions: dict[tuple[str, str], Session] = {}

    @rule(
        tenant=st.sampled_from("tu"),
        name=st.sampled_from("abc"),
        texts=st.lists(st.integers(0, 4), min_size=1, max_size=5),
    )
    def turn(self, tenant: str, name: str, texts: list[int]) -> None:
        """A session shows texts."""
        known = self.sessions.get((tenant, name)) or blank(name, tenant)
        messages = [result(f"{TEXT} Number {text}.", str(at)) for at, text in enumerate(texts)]
        self.index.note(tenant)
        self.sessions[tenant, name] = after_turn(known, messages)
        self.index.put(self.sessions[tenant, name])

    @rule(tenant=st.sampled_from("tu"), name=st.sampled_from("abc"))
    def forget(self, tenant: str, name: str) -> None:
        """A session forgets its sources."""
        if (tenant, name) in self.sessions:
            self.sessions[tenant, name] = self.sessions[tenant, name].forget_sources()
            self.index.put(self.sessions[tenant, name])

    @rule(tenant=st.sampled_from("tu"), name=st.sampled_from("abc"))
    def end(self, tenant: str, name: str) -> None:
        """A session is deleted."""
        self.sessions.pop((tenant, name), None)
        self.index.drop(tenant, name)

    @invariant()
    def every_place_is_right(self) -> None:
        """A place is in a turn that its session retains, and its tokens are the text."""
        assert len(self.index) <= 12
        found = 0
        for tenant in "tu":
            for number in range(5):
                text = f"{TEXT} Number {number}."
                for place in places(self.index, text, tenant):
                    found += 1
                    session = self.sessions[tenant, place.source.session]
                    (turn,) = [t for t in session.turns if t.turn == place.source.turn]
                    shown = turn.tokens[place.start : place.end]
                    assert "".join(map(chr, shown)) == text
        assert found == len(self.index)
        kept = self.index._tenants.values()
        assert all(places for each in kept for places in each.by_session.values())


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
