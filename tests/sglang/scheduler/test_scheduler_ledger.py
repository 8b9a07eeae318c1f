"""Questions about a scheduler's ledger: who holds and has read a span, and what waits."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest
from ledger_client import ask, control
from scheduler_kit import Scheduler, sealed, source_of, text
from secret_kit import HEAD, SPANS, TOLD, forgetting, telling
from sglang.srt.managers.communicator import FanOutCommunicator
from starlette.applications import Starlette

from leyline_engine.contract import (
    LEDGER_PATH,
    MAX_ASKED,
    MAX_QUESTION_BYTES,
    SIGNATURE_HEADER,
    Directive,
    LedgerAnswer,
    LedgerQuestion,
    Outcome,
    SourceRef,
    SpanLabel,
    SpanReaders,
    apply_directives,
    sign_bytes,
)
from leyline_engine.server import claim_clock
from leyline_engine.server.channel import ReceiptChannel
from leyline_engine.sglang.ranks import Replica, session_rank
from leyline_engine.sglang.server.http import sglang_endpoints

pytestmark = pytest.mark.usefixtures("server_args")

KEY = "the proxy's"
QUESTION = msgspec.json.encode(LedgerQuestion(scope="t", session="s", spans=("secret",)))


def edited(scheduler: Scheduler) -> None:
    """Two turns: the second one's prompt lacks the secret, but its KV has read it."""
    first, _ = scheduler.serve(TOLD, telling())
    tokens = source_of(first)
    cut = (Directive(HEAD, HEAD + 1),)
    prompt = [*apply_directives(tokens, cut), 9]
    spans = (SPANS[0], SpanLabel("tail", HEAD, len(prompt)))
    edit = telling(
        turn="t2",
        sources=(SourceRef("t1", len(tokens), sealed(first)),),
        directives=cut,
        spans=spans,
    )
    _, record = scheduler.serve(prompt, edit)
    assert record is not None and record.receipt.outcome is Outcome.SPLICED


def test_readers_are_counted_by_turn_and_lineage() -> None:
    """A cut span is shown by the turn that sent it, and read by the splice's lineage."""
    scheduler = Scheduler()
    edited(scheduler)
    found = ask(scheduler, "head", "secret", "tail", "unknown")
    assert found == LedgerAnswer(
        spans={
            "head": SpanReaders(turns=2, lineages=0, first=0),
            "secret": SpanReaders(turns=1, lineages=1, first=HEAD),
            "tail": SpanReaders(turns=2, lineages=0, first=HEAD),
        },
        pending=0,
    )


def test_a_session_is_its_tenants() -> None:
    """Another tenant's session of the same name, and another session, know no such span."""
    scheduler = Scheduler()
    edited(scheduler)
    for scope, session in (("u", "s"), ("t", "z")):
        found = ask(scheduler, "secret", scope=scope, session=session)
        assert found == LedgerAnswer(spans={}, pending=0)


def test_what_waits_for_a_running_turn_is_counted() -> None:
    """Slots that a forget waits for are the session's until they are overwritten."""
    scheduler = Scheduler()
    scheduler.serve(TOLD, telling())
    scheduler.submit([*TOLD, 5, 6], telling(turn="t2"), decode=12)
    scheduler.step()
    payload = forgetting(spans=(), forget=("*",))
    scheduler.submit([7], payload, message_id="f")
    while "f" not in scheduler.sender.records:
        scheduler.step()
    found = ask(scheduler, "secret")
    counts = scheduler.engine.forgets._forgetter.pending.counts("f")
    assert found is not None and counts is not None
    assert found.pending == counts.pending > len(TOLD)
    others = [ask(scheduler, scope="u"), ask(scheduler, session="z")]
    assert [each.pending for each in others if each] == [0, 0]
    scheduler.drain()
    found = ask(scheduler, "secret")
    assert found is not None and (found.pending, found.spans.get("secret")) == (
        0,
        SpanReaders(turns=0, lineages=0),
    )


def test_a_question_changes_nothing() -> None:
    """A scheduler that was asked holds the same, in the same order, as one that wasn't."""
    scheduler, other = Scheduler(), Scheduler()
    for each in (scheduler, other):
        edited(each)
    for _ in range(3):
        ask(scheduler, "secret", "tail")
    for each in (scheduler, other):
        each.serve(text(90, 4), telling(session="y", spans=()))
    for each in (scheduler, other):
        each.check_idle()
    assert scheduler.cache.evictable_size() == other.cache.evictable_size()
    assert list(scheduler.engine.ledger._readers) == list(other.engine.ledger._readers)
    assert list(scheduler.engine.ledger._names) == list(other.engine.ledger._names)
    assert not scheduler.engine.claims.recheck


def test_only_the_sessions_replica_answers() -> None:
    """Of two data-parallel replicas, the one that doesn't serve the session has no answer."""
    home = session_rank(("t", "s"), 2)
    for rank in range(2):
        found = ask(Scheduler(replica=Replica(rank, 2)), "secret")
        assert (found is not None) == (rank == home)


@pytest.mark.parametrize("question", ["{", '{"scope": "t"}', "[]"])
def test_what_is_no_question_is_refused(question: str, caplog: pytest.LogCaptureFixture) -> None:
    """The scheduler says that it failed, and serves on."""
    scheduler = Scheduler()
    assert not control(scheduler, question).success
    caplog.clear()
    edited(scheduler)


# Over HTTP.


class Wire:
    """SGLang's wire to schedulers, which answer a question once it is let through."""

    def __init__(self, schedulers: list[Scheduler]) -> None:
        self.schedulers = schedulers
        self.sent = 0
        self.held: list[Any] = []
        self.holds = False
        self.second = asyncio.Event()
        """Set when two questions are held."""
        self.communicator: FanOutCommunicator[Any] = FanOutCommunicator(self._send, len(schedulers))

    async def dumper_control(self, request: Any) -> list[Any]:
        found: list[Any] = await self.communicator(request)
        return found

    def _send(self, request: Any) -> None:
        self.sent += 1
        if self.holds:
            self.held.append(request)
            if len(self.held) == 2:
                self.second.set()
        else:
            asyncio.get_running_loop().call_soon(self.deliver, request)

    def deliver(self, request: Any) -> None:
        """All schedulers answer."""
        from leyline_engine.sglang import plugin

        send = SimpleNamespace(send_output=lambda out, _: self.communicator.handle_recv(out))
        for scheduler in self.schedulers:
            scheduler.ipc_channels = SimpleNamespace(  # type: ignore[attr-defined]
                send_to_tokenizer=send
            )
            plugin._control(lambda *_: None, scheduler, request)


@pytest.fixture
def channel() -> Iterator[ReceiptChannel]:
    """The channel, which no scheduler uses here."""
    opened = ReceiptChannel()
    yield opened
    opened.close()


def client_of(
    channel: ReceiptChannel, wire: Wire, *, secret: str | None = None
) -> httpx.AsyncClient:
    """A client of Leyline's routes before these schedulers."""
    endpoints = sglang_endpoints(
        channel,
        wire,
        None,
        template_kwargs={},
        replicas=len(wire.schedulers),
        secret=secret,
    )
    transport = httpx.ASGITransport(Starlette(routes=endpoints.routes()))
    return httpx.AsyncClient(transport=transport, base_url="http://engine")


async def test_a_question_wants_the_proxys_signature(channel: ReceiptChannel) -> None:
    """Unsigned or signed with another secret, it is refused and reaches no scheduler."""
    scheduler = Scheduler()
    edited(scheduler)
    wire = Wire([scheduler])
    async with client_of(channel, wire, secret=KEY) as client:
        for signature in (None, "", sign_bytes(QUESTION, "another's"), sign_bytes(b"{}", KEY)):
            headers = {} if signature is None else {SIGNATURE_HEADER: signature}
            answer = await client.post(LEDGER_PATH, content=QUESTION, headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (
                403,
                "invalid_signature",
            )
        assert not wire.sent
        headers = {SIGNATURE_HEADER: sign_bytes(QUESTION, KEY)}
        answer = await client.post(LEDGER_PATH, content=QUESTION, headers=headers)
    assert answer.json() == {
        "spans": {"secret": {"turns": 1, "lineages": 1, "first": HEAD}},
        "pending": 0,
    }


@pytest.mark.parametrize(
    ("body", "status", "names"),
    [
        (b"{", 400, "truncated"),
        (b'{"scope": "t", "session": "s"}', 400, "spans"),
        (b'{"scope": 4, "session": "s", "spans": []}', 400, "$.scope"),
        (b'{"scope": "t", "session": "s", "spans": [], "x": "\xff"}', 400, "utf-8"),
        (
            msgspec.json.encode({"scope": "t", "session": "s", "spans": ["a"] * (MAX_ASKED + 1)}),
            400,
            "$.spans",
        ),
        (b"[" * 3000, 400, ""),
        (b" " * (MAX_QUESTION_BYTES + 1), 413, str(MAX_QUESTION_BYTES)),
    ],
)
async def test_bad_questions_get_an_error(
    channel: ReceiptChannel, body: bytes, status: int, names: str
) -> None:
    """The error names the field, and no scheduler is asked."""
    wire = Wire([Scheduler()])
    async with client_of(channel, wire) as client:
        answer = await client.post(LEDGER_PATH, content=body)
    assert answer.status_code == status, answer.text
    assert names in answer.json()["error"]["message"]
    assert not wire.sent


async def test_replicas_answer_for_their_sessions(channel: ReceiptChannel) -> None:
    """Whichever of two replicas serves a session, its answer is the one that is sent."""
    schedulers = [Scheduler(replica=Replica(rank, 2)) for rank in range(2)]
    homes = set()
    async with client_of(channel, Wire(schedulers)) as client:
        for session in ("s0", "s1", "s2", "s3"):
            home = session_rank(("t", session), 2)
            schedulers[home].serve(TOLD, telling(session=session))
            asked = LedgerQuestion(scope="t", session=session, spans=("secret",))
            answer = await client.post(LEDGER_PATH, content=msgspec.json.encode(asked))
            assert answer.json()["spans"] == {"secret": {"turns": 1, "lineages": 0, "first": HEAD}}
            homes.add(home)
    assert homes == {0, 1}


async def test_a_late_answer_is_nobody_elses(
    channel: ReceiptChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy scheduler's answer to a caller that was turned away goes to no later caller."""
    monkeypatch.setattr(claim_clock, "_PATIENCE_S", 0.2)
    scheduler = Scheduler()
    edited(scheduler)
    wire = Wire([scheduler])
    wire.holds = True
    async with client_of(channel, wire) as client:
        late = await client.post(LEDGER_PATH, content=QUESTION)
        assert (late.status_code, late.json()["error"]["code"]) == (503, "not_ready")
        other = msgspec.json.encode(LedgerQuestion(scope="u", session="s", spans=("secret",)))
        asks = asyncio.create_task(client.post(LEDGER_PATH, content=other))
        await wire.second.wait()
        wire.deliver(wire.held[0])
        await asyncio.sleep(0.02)
        assert not asks.done()
        wire.deliver(wire.held[1])
        assert (await asks).json() == {"spans": {}, "pending": 0}
