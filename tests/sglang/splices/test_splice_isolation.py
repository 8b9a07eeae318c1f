"""The finders of spliced KV in a real SGLang server, and the remains of it after a forget."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import msgspec
import pytest
import torch
import zmq
from equality_kit import (
    BOUND,
    CONTROL_FACTOR,
    Played,
    PlayedSession,
    ask,
    distance,
    draw_tokens,
    expect,
    fetch_record,
    scores_of,
)
from msgspec.structs import replace
from oracle_reference import Fresh, LongWay
from pool_probe import read_watched
from sglang_server import SglangServer

from leyline_engine.contract import Directive, EditPayload, Outcome, SpanLabel

Start = Callable[[SglangServer, str], PlayedSession]

IN_CI = ("mla_server", "gqa_server")
CUT = Directive(100, 140)


def clean_run(session: PlayedSession, played: Played, output: Sequence[int]) -> LongWay:
    """The result of a prompt's own tokens, computed again, along an answer."""
    prompt = played.tokens[: played.prompt]
    return expect(session.subject, [Fresh(prompt)], len(prompt), output)


def spliced_turn(session: PlayedSession) -> Played:
    """A turn whose KV remembers 40 tokens or more that its prompt doesn't show."""
    rng = random.Random(f"{session.session} {len(session.turns)}")
    opened = session.turns[0] if session.turns else session.open(draw_tokens(rng, 300))
    cut = Directive(CUT.start, CUT.end + len(session.turns))
    played = session.edit(opened, [cut], draw_tokens(rng, 3))
    assert played.receipt.tokens.spliced > 0
    assert played.error <= BOUND
    return played


def foreign_payloads(session: PlayedSession, played: Played) -> dict[str, EditPayload | None]:
    """Payloads of those who send a turn's tokens but have no right to its spliced KV."""
    own = EditPayload(session=session.session, scope=session.scope, turn="x")
    return {
        "nobody": None,
        "same session without its map": own,
        "another session": replace(own, session="other"),
        "another tenant with its map": replace(own, scope="other", lineage=played.receipt.lineage),
    }


@pytest.mark.parametrize("name", IN_CI)
def test_spliced_kv_is_served_to_nobody_else(
    name: str, request: pytest.FixtureRequest, start_session: Start
) -> None:
    """The same visible tokens get the exact prefix only, and the answer of a clean run."""
    server: SglangServer = request.getfixturevalue(name)
    session = start_session(server, "private")
    for who in foreign_payloads(session, spliced_turn(session)):
        played = spliced_turn(session)
        prompt = played.tokens[: played.prompt]
        payload = foreign_payloads(session, played)[who]
        message = f"{session.session}.{len(session.turns)}"
        answer = ask(server, prompt, len(prompt) - 1, payload, message=message)
        assert answer["meta_info"]["cached_tokens"] == CUT.start, who
        clean = clean_run(session, played, answer["output_ids"])
        assert distance(scores_of(answer), clean) <= BOUND, who
        # Control: were the spliced KV served for these tokens, it would show.
        output = played.tokens[played.prompt :]
        remembering = played.scores[-len(output) :]
        assert distance(remembering, clean_run(session, played, output)) >= CONTROL_FACTOR * BOUND


@pytest.mark.parametrize("name", IN_CI)
def test_the_session_itself_goes_on_with_its_spliced_kv(
    name: str, request: pytest.FixtureRequest, start_session: Start
) -> None:
    """With its lineage map the next turn finds all of the last one, and nothing is copied."""
    server: SglangServer = request.getfixturevalue(name)
    session = start_session(server, "own")
    played = spliced_turn(session)
    prompt = (*played.tokens, 77, 78)
    payload = EditPayload(
        session=session.session, scope=session.scope, turn="next", lineage=played.receipt.lineage
    )
    message = f"{session.session}.next"
    answer = ask(server, prompt, len(played.tokens), payload, message=message)
    receipt = fetch_record(server, message).receipt
    assert answer["meta_info"]["cached_tokens"] == len(played.tokens) - 1
    assert (receipt.outcome, receipt.lineage) == (Outcome.UNEDITED, played.receipt.lineage)


@pytest.mark.parametrize("name", IN_CI)
def test_forgotten_kv_is_zero_and_tells_nothing(
    name: str, request: pytest.FixtureRequest, start_session: Start
) -> None:
    """Forgetting a span that was cut a turn ago zeroes its rows and those of all its readers, and
    the answer is that of a run that never saw it."""
    session = start_session(request.getfixturevalue(name), "forget")
    rng = random.Random(session.session)
    prompt = draw_tokens(rng, 300)
    spans = (
        SpanLabel("before", 0, 100),
        SpanLabel("secret", 100, 140),
        SpanLabel("rest", 140, 300),
    )
    opened = session.open(prompt, spans=spans)
    tail = draw_tokens(rng, 3)
    end = len(opened.tokens) - 40
    visible = (
        SpanLabel("before", 0, 100),
        SpanLabel("rest", 100, 260),
        SpanLabel("t0.out", 260, end),
        SpanLabel("tail", end, end + len(tail)),
    )
    spliced = session.edit(opened, [CUT], tail, spans=visible)
    assert spliced.receipt.tokens.spliced > 0
    after = spliced.tokens[: spliced.prompt]
    again = session.open(after, spans=visible, forget=("secret",), watch=opened)
    forgot = again.receipt.forgot
    assert forgot is not None
    assert (forgot.pending, forgot.shared_retained) == (0, 0)
    assert again.receipt.tokens.prefix == CUT.start
    assert again.error <= BOUND
    check_zero(opened, again, CUT.start)
    session.open(draw_tokens(rng, 5), watch=spliced)
    check_zero(spliced, session.turns[-1], CUT.start, again)


def check_zero(old: Played, watching: Played, start: int, *others: Played) -> None:
    """Slots that held an old turn's tokens from ``start`` on are zero unless taken again."""
    held = read_watched(watching.rows_file)
    taken = {slot for turn in (watching, *others) for slot in turn.rows().slots.tolist()}
    free = [i for i, slot in enumerate(held.slots.tolist()) if i >= start and slot not in taken]
    assert len(free) > 0
    before = old.rows()
    for was, now in zip((*before.keys, *before.values), (*held.keys, *held.values), strict=True):
        assert was[free].abs().amax(dim=(1, 2)).min() > 0
        assert not now[free].any()
    kept = [i for i, slot in enumerate(held.slots.tolist()) if i < start]
    assert torch.equal(before.keys[0][kept], held.keys[0][kept])


def test_kv_events_tell_of_spliced_sessions(
    gqa_server: SglangServer, kv_events: str, start_session: Start
) -> None:
    """With KV events on, a spliced session works, and all ids in its events are 31-bit numbers."""
    context = zmq.Context.instance()
    with context.socket(zmq.SUB) as subscriber:
        subscriber.setsockopt(zmq.SUBSCRIBE, b"")
        subscriber.connect(kv_events)
        session = start_session(gqa_server, "events")
        rng = random.Random(session.session)
        opened = session.open(draw_tokens(rng, 300))
        played = session.edit(opened, [CUT], draw_tokens(rng, 3))
        stored = stored_tokens(subscriber, len(played.tokens) - 1 - CUT.start)
    assert played.error <= BOUND
    assert all(0 <= token < 2**31 for token in stored)


def stored_tokens(subscriber: zmq.Socket[bytes], at_least: int) -> list[int]:
    """Token ids of blocks that were stored, once there are that many under a lineage."""
    stored: list[int] = []
    while sum(token >= 2**24 for token in stored) < at_least:
        assert subscriber.poll(10_000), "no KV events came"
        batch = msgspec.msgpack.decode(subscriber.recv_multipart()[-1])
        for event in batch[1] if isinstance(batch, list) else batch["events"]:
            if event["type"] == "BlockStored":
                stored += event["token_ids"]
    return stored
