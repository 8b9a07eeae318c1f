"""Forgets beside requests of other sessions that drew on shared KV, and what is left of it.

Session s hides a secret under a scope that session y has, too. Session y never sent the secret, and
is somewhere in a request when s forgets it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import pytest
import torch
from support.replay_engine import (
    SCOPE,
    admit,
    cached,
    contents,
    edit,
    free_slots,
    ids,
    make_engine,
    prefill,
    random_tokens,
    reference,
    register,
    retained,
    same_logits,
)
from taint_kit import Taint

import leyline_engine.records.ledger
from leyline_engine.contract import Directive, EditPayload, SpanLabel, TurnRecord
from leyline_replay.engine import GenerationRequest
from leyline_replay.sequence import Sequence as Running

SECRET = 200


def text(count: int, seed: int) -> list[int]:
    """Random tokens without the secret."""
    return [1 if token == SECRET else token for token in random_tokens(count, seed)]


HEAD, TAIL = text(60, 1), text(60, 2)
TOLD = [*HEAD, SECRET, *TAIL]
LABELS = (SpanLabel("head", 0, 60), SpanLabel("secret", 60, 61), SpanLabel("tail", 61, len(TOLD)))
CUTS = [Directive(40, 44), Directive(60, 61)]
READER = 56
"""The position of the secret's first reader once both are cut; KV is moved from 40 on."""
MORE = [5, 6, *text(40, 3)]


def labelled(payload: EditPayload, prompt: Sequence[int], share: str = "crew") -> EditPayload:
    """The payload in a shared scope, with one label for its prompt."""
    spans = (SpanLabel(f"{payload.session} {payload.turn}", 0, len(prompt)),)
    return msgspec.structs.replace(payload, share=share, spans=spans)


class Crew:
    """An engine on which s has shared what it made of the secret."""

    def __init__(self, cuts: Sequence[Directive] = CUTS) -> None:
        self.engine = make_engine(pool=2000, chunk=16)
        self.taint = Taint(self.engine, SECRET)
        self.run(TOLD, msgspec.structs.replace(register("t1"), spans=LABELS))
        self.prompt, hides = edit(TOLD, cuts, tail=[9, 8])
        _, record = self.run(self.prompt, labelled(hides, self.prompt))
        assert record.receipt.tokens.spliced == len(TOLD) - cuts[0].end - (len(cuts) - 1)
        self.lineage = record.receipt.lineage
        self.longer = [*self.prompt, *MORE]

    def admit(self, prompt: Sequence[int], payload: EditPayload) -> Running:
        """Admit a request, and follow what it computes."""
        return self.taint.follow(admit(self.engine, prompt, payload))

    def run(self, prompt: Sequence[int], payload: EditPayload) -> tuple[torch.Tensor, TurnRecord]:
        """One request from admission to finish."""
        sequence = self.admit(prompt, payload)
        return prefill(sequence), sequence.finish()

    def finds(self, turn: str = "y1", session: str = "y") -> Running:
        """A request that continues what s shared."""
        running = self.admit(self.longer, labelled(register(turn, session=session), self.longer))
        assert running.receipt.tokens.prefix == len(self.prompt)
        return running

    def moves(self, cut: Directive, share: str = "") -> Running:
        """A request of y that splices what it has found before."""
        prefilled = self.finds("y0")
        prefill(prefilled)
        prefilled.finish()
        prompt, payload = edit(
            self.longer,
            [cut],
            tail=MORE[:20],
            source_turn="y0",
            turn="y1",
            session="y",
            lineage=self.lineage,
        )
        running = self.admit(prompt, labelled(payload, prompt, share))
        assert running.receipt.tokens.spliced > len(TAIL)
        return running

    def forget(self, name: str = "secret") -> Running:
        """The request of s that forgets, admitted."""
        payload = EditPayload(
            session="s", scope=SCOPE, turn="t9", spans=(SpanLabel("new", 0, 90),), forget=(name,)
        )
        return self.admit([*HEAD, *text(30, 9)], payload)

    def remembered(self) -> int:
        """Count the slots that hold something that has read the secret, free ones included."""
        return int(self.taint.flags.sum())


def found(crew: Crew) -> Running:
    """Found by plain matching."""
    return crew.finds()


def own(crew: Crew) -> Running:
    """Spliced from there, into a lineage of its own."""
    return crew.moves(Directive(30, 34))


def again(crew: Crew) -> Running:
    """Spliced from there, under the shared name once more."""
    return crew.moves(Directive(35, 38), share="crew")


def across(crew: Crew) -> Running:
    """Spliced after a gap that held the shared lineage's first reader: the prefix that was found
    has read nothing, and the copies have."""
    running = crew.moves(Directive(45, READER + 2, tuple(text(READER + 2 - 45, 6))))
    assert running.receipt.tokens.prefix == 45
    return running


def steps(count: int) -> Callable[[Running], None]:
    """So many chunks were computed."""

    def take(running: Running) -> None:
        for _ in range(count):
            assert running.prefill_step() is None

    return take


def decodes(running: Running) -> None:
    """The prompt is done and published, and two tokens were fed back."""
    logits = prefill(running)
    for token in (11, 12):
        logits = running.decode_step(token)
    assert logits is not None


def complete(running: Running) -> TurnRecord:
    """Run to its end."""
    if running.pending:
        prefill(running)
    running.decode_step(13)
    return running.finish(14)


@pytest.mark.parametrize("end", [complete, Running.abort], ids=["ends", "is given up"])
@pytest.mark.parametrize("before", [steps(0), steps(1), decodes], ids=["new", "chunk", "decodes"])
@pytest.mark.parametrize("draws", [found, own, again, across])
@pytest.mark.parametrize("name", ["secret", "never heard of"])
def test_nothing_that_drew_on_shared_kv_outlives_a_forget(
    draws: Callable[[Crew], Running],
    before: Callable[[Running], None],
    end: Callable[[Running], TurnRecord],
    name: str,
) -> None:
    """A running request of another session keeps nothing, and the forget waits until it ends."""
    crew = Crew()
    running = draws(crew)
    before(running)
    tokens, lineage = [*running.prompt, 11, 12, 13], running.lineage
    forget = crew.forget(name)
    counts = forget.receipt.forgot
    assert counts is not None
    assert counts.pending >= len(running.owned) > 0
    assert crew.remembered() > 0
    prefill(forget)
    forget.finish()
    record = end(running)
    closed = crew.engine.settled_forgets()[forget.receipt.message_id]
    assert (closed.pending, closed.overwritten > counts.overwritten) == (0, True)
    assert crew.remembered() == 0
    assert record.receipt.turn == ""
    assert "y1" not in retained(crew.engine, "y")
    assert len(cached(crew.engine, tokens, lineage)) <= READER


@pytest.mark.parametrize("forgets", [True, False])
def test_an_answer_after_a_forget_is_that_of_somebody_who_never_heard_of_the_secret(
    forgets: bool,
) -> None:
    """The same shared tokens are prefilled, though a request that drew on them has just ended."""
    crew = Crew(CUTS[1:])
    running = crew.finds()
    if forgets:
        forget = crew.forget()
        prefill(forget)
        forget.finish()
    complete(running)
    asked = [*crew.longer, 13, 7]
    answer, record = crew.run(asked, labelled(register("y2", session="y"), asked))
    assert record.receipt.tokens.prefix == (60 if forgets else len(crew.longer) + 1)
    assert same_logits(answer, reference(asked)) == forgets


@pytest.mark.parametrize("ends_first", [True, False])
def test_the_same_tokens_spliced_anew_are_not_taken_for_those_that_were_forgotten(
    ends_first: bool,
) -> None:
    """The new KV is found under one shared name and beside a request that still holds the old."""
    crew = Crew(CUTS[1:])
    running = crew.finds()
    told = [*HEAD, SECRET + 1, *TAIL]
    crew.run(told, labelled(register("z1", session="z"), told, share=""))
    crew.forget().abort()
    prompt, payload = edit(told, CUTS[1:], tail=[9, 8], source_turn="z1", turn="z2", session="z")
    anew = crew.admit(prompt, labelled(payload, prompt))
    assert anew.receipt.tokens.spliced == len(TAIL)
    assert anew.lineage == running.lineage
    if ends_first:
        complete(running)
    prefill(anew)
    held = anew.held
    anew.finish()
    if not ends_first:
        complete(running)
    assert cached(crew.engine, prompt, anew.lineage).tolist() == held.tolist()
    assert crew.remembered() == 0


def test_what_waits_in_the_queue_finds_nothing_of_what_was_forgotten_meanwhile() -> None:
    """A request that could not be admitted before the forget is an ordinary prefill after it."""
    crew = Crew(CUTS[1:])
    crew.engine.examine(
        GenerationRequest(
            "waits", ids(crew.longer), labelled(register("y1", session="y"), crew.longer)
        )
    )
    crew.forget().abort()
    answer, record = crew.run(crew.longer, labelled(register("y1", session="y"), crew.longer))
    assert record.receipt.tokens.prefix == 60
    assert same_logits(answer, reference(crew.longer))
    assert crew.remembered() == 0


def test_a_running_splice_of_what_too_many_spans_are_known_of_is_withheld(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """When the ledger has given up naming the spans that shared KV has read, a copy may have read
    it."""
    monkeypatch.setattr(leyline_engine.records.ledger, "MAX_READERS", 1)
    crew = Crew()
    running = own(crew)
    crew.forget().abort()
    complete(running)
    assert retained(crew.engine, "y") == ["y0"]
    assert crew.remembered() == 0


@pytest.mark.parametrize("draws", [found, own])
@pytest.mark.parametrize("name", ["secret", "never heard of"])
def test_a_running_request_outlives_what_the_ledger_knew_of_its_lineage(
    draws: Callable[[Crew], Running], name: str
) -> None:
    """The KV that it found or copied may have read anything then, and is withheld all the same."""
    crew = Crew()
    running = draws(crew)
    crew.engine.cache.ledger._max_lineages = 1
    other = text(80, 20)
    crew.run(other, labelled(register("w1", session="w"), other, share=""))
    prompt, payload = edit(
        other, [Directive(40, 44)], tail=[3], source_turn="w1", turn="w2", session="w"
    )
    crew.run(prompt, labelled(payload, prompt, share=""))
    assert len(cached(crew.engine, crew.prompt, crew.lineage)) == 40
    forget = crew.forget(name)
    assert forget.receipt.forgot is not None and forget.receipt.forgot.pending > 0
    forget.abort()
    assert complete(running).receipt.turn == ""
    assert crew.remembered() == 0


def test_a_request_that_drew_on_nothing_shared_is_not_withheld() -> None:
    """A forget leaves alone another session's own work, and text before the secret."""
    crew = Crew()
    prompt = [*HEAD[:40], *MORE]
    before = crew.admit(prompt, labelled(register("y1", session="y"), prompt))
    assert before.receipt.tokens.prefix == 40
    mine = text(80, 21)
    crew.run(mine, labelled(register("x1", session="x"), mine, share=""))
    moved, payload = edit(
        mine, [Directive(40, 44)], tail=[3], source_turn="x1", turn="x2", session="x"
    )
    aside = crew.admit(moved, labelled(payload, moved, share=""))
    forget = crew.forget()
    assert forget.receipt.forgot is not None and forget.receipt.forgot.pending == 0
    forget.abort()
    complete(aside)
    complete(before)
    assert retained(crew.engine, "x") == ["x1", "x2"]
    assert crew.remembered() == 0
    again = [*moved, 13, 2]
    _, found = crew.run(
        again, msgspec.structs.replace(register("x3", session="x"), lineage=aside.lineage)
    )
    assert found.receipt.tokens.prefix == len(moved) + 1


def computed_twice(crew: Crew) -> None:
    """Two requests of one prompt side by side: the second one's KV is there already."""
    twins = [crew.admit([*TOLD, 5, *TAIL], register(turn)) for turn in ("a", "b")]
    for twin in twins:
        prefill(twin)
        twin.finish()


def given_up(crew: Crew) -> None:
    """A request whose client hung up."""
    running = crew.admit([*TOLD, 5, *TAIL], register("a"))
    running.prefill_step()
    running.abort()


def evicted(crew: Crew) -> None:
    """All of it made room for something that ended."""
    cache = crew.engine.cache
    cache._allocator.release(cache.allocate(cache.capacity))


def flushed(crew: Crew) -> None:
    """Somebody emptied the cache."""
    crew.engine.flush()


@pytest.mark.parametrize("left", [computed_twice, given_up, evicted, flushed])
@pytest.mark.parametrize("taken", [0, 1900])
def test_a_forget_overwrites_what_nobody_holds(left: Callable[[Crew], None], taken: int) -> None:
    """Free slots, and those that were given to a request and aren't written to yet."""
    crew = Crew()
    left(crew)
    free = free_slots(crew.engine)
    assert crew.taint.flags[free].any()
    slots = crew.engine.cache.allocate(min(taken, len(free)))
    crew.engine.cache.forget((SCOPE, "s"), None, spared=(), ticket="t")
    assert crew.remembered() == 0
    crew.engine.cache.release(slots)


def test_a_forget_leaves_what_was_written_to_slots_that_others_had_before() -> None:
    """Another session's computed and copied KV stays as it was, byte for byte."""
    crew = Crew()
    evicted(crew)
    mine = text(80, 21)
    crew.run(mine, labelled(register("x1", session="x"), mine, share=""))
    moved, payload = edit(
        mine, [Directive(40, 44)], tail=[3], source_turn="x1", turn="x2", session="x"
    )
    _, record = crew.run(moved, labelled(payload, moved, share=""))
    slots = cached(crew.engine, moved, record.receipt.lineage).tolist()
    before = contents(crew.engine)
    crew.forget().abort()
    after = contents(crew.engine)
    assert len(slots) == len(moved)
    assert all(before[slot] == after[slot] for slot in slots)
