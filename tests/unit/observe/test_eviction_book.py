"""The book of evicted texts, against a model that compares them window by window."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import pytest
from eviction_talks import Talk, evicted, text_with
from hypothesis import given
from hypothesis import strategies as st

from leyline_policies.quotes import WINDOW, plain
from leyline_policies.recall import Evicted
from leyline_proxy.observe import eviction_rates
from leyline_proxy.observe.eviction_rates import EvictionBook, SessionEvictions, Tokens

LISTING, NOTES = text_with(1, 2, 3, 4), text_with(5, 6, 7)
RED, BLUE = ("red", "s"), ("blue", "s")


def windows(text: str) -> set[str]:
    """Every run of 32 characters."""
    return {text[at : at + WINDOW] for at in range(len(text) - WINDOW + 1)}


def places(text: str, among: Iterable[str]) -> set[int]:
    """Places in a text that lie in one of these windows."""
    found = set(among)
    starts = [at for at in range(len(text) - WINDOW + 1) if text[at : at + WINDOW] in found]
    return {place for at in starts for place in range(at, at + WINDOW)}


@dataclass
class Known:
    """The model's knowledge of one text."""

    part: Evicted
    gone: set[int]
    said: set[int] = field(default_factory=set)
    back: bool = False

    def tokens(self, chars: int) -> int:
        """The tokens of so many characters."""
        return round(self.part.tokens * chars / len(plain(self.part.text)))

    def fates(self) -> Tokens:
        """The tokens of the whole session so far."""
        whole, said = self.tokens(len(self.gone)), self.tokens(len(self.said & self.gone))
        rest = whole - said if self.back else 0
        policy = self.part.policy
        return Counter(
            {("evicted", policy): whole, ("quoted", policy): said, ("recalled", policy): rest}
        )


class Model:
    """A session, with the prompt of each turn kept until the answer to it is known."""

    def __init__(self) -> None:
        self._known: dict[str, Known] = {}
        self._prompt: set[str] = set()

    def turn(self, sent: Sequence[str], answer: str, parts: Sequence[Evicted], back: str) -> None:
        """Add a turn: the answer to the one before, what is sent, and an address put back."""
        quoted = windows(plain(answer)) - self._prompt
        for each in self._known.values():
            if not each.back:
                each.said |= places(plain(each.part.text), quoted)
        self._prompt = {window for text in sent for window in windows(plain(text))}
        for part in parts:
            text = plain(part.text)
            kept = places(text, self._prompt)
            self._known.setdefault(part.address, Known(part, {*range(len(text))} - kept))
        if back in self._known:
            self._known[back].back = True

    def fates(self) -> Tokens:
        """The tokens of the whole session so far."""
        return +sum((each.fates() for each in self._known.values()), Counter())


texts = st.lists(st.integers(0, 9), min_size=2, max_size=6).map(lambda found: text_with(*found))
turns = st.lists(
    st.tuples(texts, st.one_of(st.just("Done."), texts), st.integers(0, 5), st.booleans()),
    min_size=2,
    max_size=8,
)


@given(turns, st.lists(st.integers(1, 50), min_size=9, max_size=9))
def test_counts_are_those_of_every_window(
    script: list[tuple[str, str, int, bool]], sizes: list[int]
) -> None:
    """Over any conversation, the tokens evicted, quoted and recalled are those of a model that
    keeps each prompt and compares every window; what was needed never exceeds what was evicted."""
    talk, session, model, found = Talk(), SessionEvictions(), Model(), Counter[tuple[str, str]]()
    gone: dict[str, Evicted] = {}
    answer = ""
    for (result, says, picked, recalls), size in zip(script, sizes, strict=False):
        if answer:
            talk.answer(answer)
        talk.result(result)
        results = [m["content"] for m in talk.messages if m["role"] == "tool"]
        if picked < len(results):
            part = evicted(results[picked], size, f"policy-{size % 2}")
            gone.setdefault(part.address, part)
        parts = [*gone.values()]
        prepared = talk.turn(parts)
        back = parts[picked % len(parts)].address if recalls and parts else ""
        found += session.turn(prepared, [back])
        model.turn([m["content"] for m in prepared.messages], answer, parts, back)
        assert found == model.fates()
        answer = says
    for policy in {policy for _, policy in found}:
        needed = found["quoted", policy] + found["recalled", policy]
        assert needed <= found["evicted", policy]


def started(session: SessionEvictions) -> Talk:
    """A conversation whose listing has been evicted."""
    talk = Talk()
    talk.result(LISTING)
    session.turn(talk.turn())
    talk.answer("I see.")
    talk.result("ok")
    assert session.turn(talk.turn([evicted(LISTING, 40)])) == {("evicted", "cut"): 40}
    return talk


def test_a_text_counts_once() -> None:
    """A text that stays evicted isn't counted again, and one that is recalled twice is needed
    once."""
    session = SessionEvictions()
    talk, part = started(session), evicted(LISTING, 40)
    assert session.turn(talk.turn([part])) == {}
    assert session.turn(talk.turn([part]), [part.address]) == {("recalled", "cut"): 40}
    assert session.turn(talk.turn([part]), [part.address]) == {}
    assert session.recalled([part.address, "sha256:other"]) == {}


def test_quotes_after_a_recall_are_no_error() -> None:
    """A text that was put back may be quoted: the model had it, and it counts as recalled."""
    session = SessionEvictions()
    talk, part = started(session), evicted(LISTING, 40)
    session.turn(talk.turn([part]), [part.address])
    talk.answer(text_with(1, 2))
    assert session.turn(talk.turn([part]), [part.address]) == {}


def test_what_leaves_after_the_answer_is_no_quote() -> None:
    """An answer may repeat a text that was evicted only on the turn after it."""
    session = SessionEvictions()
    talk = started(session)
    copy = f"Again: {LISTING}"
    talk.result(copy)
    session.turn(talk.turn([evicted(LISTING, 40)]))
    talk.answer(text_with(1, 2, 3))
    found = session.turn(talk.turn([evicted(LISTING, 40), evicted(copy)]))
    assert not found["quoted", "cut"]


@pytest.mark.parametrize("changed", ["front", "end"])
def test_a_client_may_rewrite_its_list(changed: str) -> None:
    """The answer is found after the last turn's last message; if that is gone, nothing is taken
    for an answer."""
    session = SessionEvictions()
    talk, part = started(session), evicted(LISTING, 40)
    del talk.messages[0 if changed == "front" else -1]
    talk.answer(text_with(2, 3))
    found = session.turn(talk.turn([part]))
    assert found == ({("quoted", "cut"): 20} if changed == "front" else {})


def test_a_session_from_elsewhere_counts_what_it_evicts_here() -> None:
    """Texts that were evicted before a session came don't count, however they are needed; later
    ones do."""
    session = SessionEvictions(late=True)
    talk, old, new = Talk(), evicted(LISTING, 40), evicted(NOTES, 30)
    talk.result(LISTING)
    talk.result(NOTES)
    assert session.turn(talk.turn([old])) == {}
    talk.answer(LISTING)
    assert session.turn(talk.turn([old, new]), [old.address]) == {("evicted", "cut"): 30}
    talk.answer(NOTES)
    assert session.turn(talk.turn([old, new])) == {("quoted", "cut"): 30}


def test_long_texts_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text beyond the limit counts whole, can be recalled, and takes no memory."""
    monkeypatch.setattr(eviction_rates, "LONGEST", len(LISTING) - 1)
    session, idle = SessionEvictions(), SessionEvictions()
    started(session)
    assert session.weight - idle.weight < len(LISTING) + 400
    assert session.recalled([evicted(LISTING).address]) == {("recalled", "cut"): 40}


def test_a_session_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond its number of texts nothing is counted, and beyond its characters nothing is
    searched."""
    monkeypatch.setattr(eviction_rates, "MOST_PARTS", 20)
    monkeypatch.setattr(eviction_rates, "MOST_CHARS", 600)
    session, talk, found = SessionEvictions(), Talk(), Counter[tuple[str, str]]()
    gone: list[Evicted] = []
    for number in range(60):
        text = text_with(10 * number, 10 * number + 1)
        talk.result(text)
        gone.append(evicted(text, 10))
        found += session.turn(talk.turn(gone))
        assert session.weight <= 1024 + 20 * 400 + 600
    assert found == {("evicted", "cut"): 200}


def filled(book: EvictionBook, owner: tuple[str, str], number: int) -> None:
    """Evict a long text in a session."""
    talk = Talk()
    text = text_with(*range(number, number + 40))
    talk.result(text)
    book.open(owner, first=True).turn(talk.turn([evicted(text)]))
    book.weigh(owner)


def test_the_tenant_with_the_most_loses_its_oldest() -> None:
    """A tenant with many sessions can't take the room of others, and its newest stay."""
    book = EvictionBook(most_weight=12_000)
    filled(book, BLUE, 0)
    for number in range(30):
        filled(book, ("red", f"s-{number}"), number)
        assert book.weight <= 12_000
    book.open(("red", "s-27"), first=False)
    filled(book, ("red", "s-30"), 30)
    assert book.get(BLUE) is not None
    kept = [number for number in range(31) if book.get(("red", f"s-{number}")) is not None]
    assert kept == [27, 29, 30], "the least recently used goes first"
    for number in kept:
        book.drop(("red", f"s-{number}"))
    book.drop(BLUE)
    assert (len(book), book.weight) == (0, 0)


def test_a_forget_leaves_no_text() -> None:
    """After a forget a session has no text and counts only what is evicted later; its level never
    falls."""
    book = EvictionBook()
    filled(book, RED, 0)
    before = book.get(RED)
    book.forget(RED, 2)
    after = book.get(RED)
    assert before is not after and after is not None
    assert (after.texts, after.level) == (0, 2)
    book.forget(RED, 1)
    last = book.get(RED)
    assert last is not None and last.level == 2
    part = evicted(LISTING)
    talk = Talk()
    talk.result(LISTING)
    assert last.turn(talk.turn([part]), [part.address]) == {}
    assert book.weight == last.weight - 400, "the next weighing adds the text's"
