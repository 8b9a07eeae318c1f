"""Forgets that follow KV from the session that spliced it to those it was shared with."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import msgspec
import pytest
import torch
from scheduler_kit import SALT, Scheduler, sealed, source_of, text
from secret_kit import HEAD, SECRET, TAIL, TOLD, telling
from sglang.srt.managers.schedule_batch import Req

from leyline_engine.contract import (
    Directive,
    EditPayload,
    LineageRun,
    Outcome,
    SourceRef,
    SpanLabel,
    TurnRecord,
    apply_directives,
    output_span,
)
from leyline_engine.records.lineage import fold_keys, share_lineage
from leyline_engine.records.publications import Space

pytestmark = pytest.mark.usefixtures("server_args")

SHARED = (LineageRun(HEAD, share_lineage("crew", salt=SALT)),)


def spliced(
    source: Req,
    cuts: Sequence[Directive],
    payload: EditPayload,
    turn: str,
) -> tuple[array[int], EditPayload]:
    """A prompt that takes ``cuts`` out of a finished turn, and its payload."""
    prompt = apply_directives(source_of(source), cuts)
    ref = SourceRef(turn, len(source_of(source)), sealed(source))
    payload = msgspec.structs.replace(payload, sources=(ref,), directives=tuple(cuts))
    return array("q", [*prompt, 9, 8]), payload


class Crew:
    """Session s hides a secret under a scope that session y has, too."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        source, _ = scheduler.serve(TOLD, telling())
        end = len(source_of(source)) - 1
        self.labels = (
            SpanLabel("head", 0, HEAD),
            SpanLabel("tail", HEAD, len(TOLD) - 1),
            SpanLabel(output_span("t1"), len(TOLD) - 1, end),
            SpanLabel("more", end, end + 2),
        )
        hides = EditPayload(session="s", scope="t", turn="t2", spans=self.labels, share="crew")
        self.prompt, hides = spliced(source, [Directive(HEAD, HEAD + 1)], hides, "t1")
        record = self.ended(self.prompt, hides)
        assert record.receipt.outcome is Outcome.SPLICED
        assert record.receipt.lineage == SHARED

    def ended(self, prompt: Sequence[int], payload: EditPayload) -> TurnRecord:
        """The outcome of a request that ran alone."""
        _, record = self.scheduler.serve(prompt, payload)
        assert record is not None
        return record

    def join(self, *more: int) -> Req:
        """Session y continues what s shared."""
        prompt = [*self.prompt, *more]
        whole = (SpanLabel("k", 0, len(prompt)),)
        payload = EditPayload(session="y", scope="t", turn="y1", spans=whole, share="crew")
        req, record = self.scheduler.serve(prompt, payload)
        assert record is not None
        assert record.receipt.tokens.prefix == len(self.prompt)
        return req

    def own_splice(self, joined: Req) -> tuple[array[int], EditPayload]:
        """Session y edits, and keeps the result to itself."""
        payload = EditPayload(session="y", scope="t", turn="y2", lineage=SHARED)
        prompt, payload = spliced(joined, [Directive(40, 44)], payload, "y1")
        return prompt, msgspec.structs.replace(payload, spans=(SpanLabel("k", 0, len(prompt)),))

    def forgetting(self) -> tuple[array[int], EditPayload]:
        """Session s forgets what it has hidden."""
        payload = EditPayload(
            session="s", scope="t", turn="t9", spans=self.labels, forget=("secret",)
        )
        return self.prompt, payload

    def held(self) -> int:
        """The number of slots that hold something that has read the secret, free ones included."""
        every = torch.arange(1, self.scheduler.capacity + 1)
        rows = self.scheduler.read(every)
        return sum(SECRET in self.scheduler.has_read[nonce] for _, _, nonce in rows)

    def found(self, tokens: Sequence[int], lineage: tuple[LineageRun, ...]) -> int:
        """The number of a prompt's tokens cached under a map."""
        keys = fold_keys(tokens, lineage, "t")
        return int(self.scheduler.cache.find(keys, Space()).device_prefix_len)


@pytest.fixture
def crew() -> Crew:
    """Both sessions, and nothing running."""
    return Crew(Scheduler())


def test_a_forget_reaches_what_another_session_went_on_with(crew: Crew) -> None:
    """KV of a shared scope goes with the secret that it read, whichever session computed it."""
    joined = crew.join(5, 6)
    assert crew.found(source_of(joined), SHARED) > len(crew.prompt)
    forgot = crew.ended(*crew.forgetting()).receipt.forgot
    assert forgot is not None
    assert forgot.pending == 0
    assert crew.found(source_of(joined), SHARED) == HEAD
    assert crew.held() == 0
    crew.scheduler.check_idle()


def test_a_forget_reaches_what_another_session_spliced_of_it(crew: Crew) -> None:
    """A private splice of shared KV goes from the first token that read the secret on."""
    prompt, payload = crew.own_splice(crew.join(5, 6))
    record = crew.ended(prompt, payload)
    assert record.receipt.tokens.spliced > TAIL
    forgot = crew.ended(*crew.forgetting()).receipt.forgot
    assert forgot is not None
    assert forgot.pending == 0
    # What was copied from before the secret stays: four tokens were cut in front of it.
    assert crew.found(prompt, record.receipt.lineage) == HEAD - 4
    assert crew.held() == 0
    crew.scheduler.check_idle()


def test_a_running_splice_of_shared_kv_is_not_published_after_a_forget(crew: Crew) -> None:
    """Another session's request that drew on it ends, and nothing of it is kept."""
    prompt, payload = crew.own_splice(crew.join(5, 6))
    running = crew.scheduler.submit(prompt, payload, decode=12, message_id="running")
    crew.scheduler.step()
    demanded, demand = crew.forgetting()
    forget = crew.scheduler.submit(demanded, demand, decode=1, message_id="forget")
    while not forget.finished():
        crew.scheduler.step()
    assert not running.finished()
    assert crew.scheduler.sender.records["forget"].receipt.forgot.pending > 0
    crew.scheduler.drain()
    assert crew.scheduler.sender.forgotten["forget"].pending == 0
    assert crew.scheduler.sender.records["running"].receipt.turn == ""
    assert crew.held() == 0
    crew.scheduler.check_idle()


@pytest.mark.parametrize("began", [False, True])
def test_a_running_request_that_found_shared_kv_publishes_nothing_after_a_forget(
    crew: Crew, began: bool
) -> None:
    """Its further KV has read the secret, too, whether it decodes or only waits."""
    prompt = [*crew.prompt, 5, 6]
    whole = (SpanLabel("k", 0, len(prompt)),)
    payload = EditPayload(session="y", scope="t", turn="y1", spans=whole, share="crew")
    running = crew.scheduler.submit(prompt, payload, decode=12, message_id="running")
    demanded, demand = crew.forgetting()
    if began:
        crew.scheduler.step()
    forget = crew.scheduler.submit(demanded, demand, decode=1, message_id="forget")
    while not forget.finished():
        crew.scheduler.step()
    assert not running.finished()
    assert crew.scheduler.sender.records["forget"].receipt.forgot.pending > 0
    crew.scheduler.drain()
    assert crew.found(source_of(running), SHARED) == HEAD
    assert crew.scheduler.sender.forgotten["forget"].pending == 0
    assert crew.held() == 0
    crew.scheduler.check_idle()


def test_a_splice_is_not_filed_as_shared_kv_that_waits_to_be_removed(crew: Crew) -> None:
    """The same tokens under the same scope, spliced again from elsewhere, are KV of their own."""
    scheduler = crew.scheduler
    prompt = [*crew.prompt, 5, 6]
    whole = (SpanLabel("k", 0, len(prompt)),)
    payload = EditPayload(session="y", scope="t", turn="y1", spans=whole, share="crew")
    running = scheduler.submit(prompt, payload, decode=40)
    scheduler.step()
    told = [*TOLD[:HEAD], SECRET + 1, *TOLD[HEAD + 1 :]]
    source = scheduler.submit(told, EditPayload(session="z", scope="t", turn="z1"))
    demand = EditPayload(session="s", scope="t", turn="t9", forget=("secret",))
    scheduler.submit(TOLD[: HEAD - 9], demand, decode=1, message_id="forget")
    while not source.finished():
        scheduler.step()
    assert scheduler.cache.condemned
    shares = EditPayload(session="z", scope="t", turn="z2", share="crew")
    anew = scheduler.submit(
        *spliced(source, [Directive(HEAD, HEAD + 1)], shares, "z1"), decode=3, message_id="anew"
    )
    while not anew.output_ids:
        scheduler.step()
    assert not running.finished()
    assert scheduler.remembered(scheduler.slots_of(anew)) == {SECRET + 1}
    scheduler.drain()
    assert scheduler.sender.records["anew"].receipt.tokens.spliced > TAIL
    assert scheduler.sender.forgotten["forget"].pending == 0
    assert crew.held() == 0
    scheduler.check_idle()


def test_nobody_finds_shared_kv_after_a_forget_that_failed(
    crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other sessions' KV from it is condemned along with the session's publications."""
    prompt, payload = crew.own_splice(crew.join(5, 6))
    record = crew.ended(prompt, payload)
    with monkeypatch.context() as broken:
        broken.setattr(crew.scheduler.engine.publications, "under", None)
        crew.ended(*crew.forgetting())
    assert crew.found(prompt, record.receipt.lineage) <= 40
    assert crew.held() == 0
    crew.scheduler.check_idle()


def test_kv_of_a_lineage_that_the_ledger_dropped_is_found_by_nobody() -> None:
    """If a splice's reads aren't known any more, it is removed from every session."""
    scheduler = Scheduler()
    scheduler.engine.ledger._max_lineages = 1
    crew = Crew(scheduler)
    joined = crew.join(5, 6)
    source, _ = scheduler.serve(text(70, 3), EditPayload(session="z", scope="t", turn="z1"))
    other = EditPayload(session="z", scope="t", turn="z2")
    crew.ended(*spliced(source, [Directive(40, 44)], other, "z1"))
    assert crew.found(source_of(joined), SHARED) == HEAD
    scheduler.check_idle()
