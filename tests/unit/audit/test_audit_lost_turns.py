"""Turns that were under way at a worker that died, in the log of all workers."""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NoReturn

import httpx
import msgspec
import pytest
from audit_kit import AT, judged, writer
from support.fake_engine import MODEL, FakeEngine
from support.hubs import hub, link
from support.waiting import until

from leyline_proxy.audit.records import MAX_NAMES, lost_record
from leyline_proxy.http.app import create_app
from leyline_proxy.hub.audit import RECORDS, HubAudit, LostTurn, SharedTurns
from leyline_proxy.observe import auditor
from leyline_proxy.settings import Settings
from leyline_proxy.upstream.embedded import ASGIStreamTransport, lifespan_of


def turn(number: int) -> LostTurn:
    """A turn of red's session."""
    return LostTurn(f"m{number}", "red", "s", f"t{number}")


def record(number: int) -> bytes:
    """Its record, as a worker sends it."""
    return msgspec.json.encode({"kind": "turn", "message_id": f"m{number}", "tenant": "red"})


def logged(path: Path) -> list[dict[str, Any]]:
    """The log's records but its start and end."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [each for each in lines if each["kind"] not in ("start", "stop")]


async def test_turns_without_a_record_are_named_when_their_worker_dies(tmp_path: Path) -> None:
    """Not those that were recorded, that needed no record, or that are another worker's."""
    path = tmp_path / "log"
    log = writer(path)
    log.start()
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(hub(tmp_path / "hub", HubAudit(log)))
        first = await stack.enter_async_context(link(tmp_path / "hub", 0))
        second = await stack.enter_async_context(link(tmp_path / "hub", 1))
        mine, others = SharedTurns(first), SharedTurns(second)
        for number in range(4):
            mine.begun(turn(number))
        others.begun(turn(4))
        mine.ended("m0")
        await first.ask(RECORDS, [record(1), record(9)])
        await first.aclose()
        await until(lambda: any(each["kind"] == "gap" for each in logged(path)))
        await second.ask(RECORDS, [record(4)])
        await second.aclose()
    log.close(5.0)
    found = logged(path)
    (gap,) = [each for each in found if each["kind"] == "gap"]
    assert (gap["lost"], gap["cause"]) == (2, "worker")
    assert gap["turns"] == [msgspec.structs.asdict(turn(number)) for number in (2, 3)]
    assert [each["message_id"] for each in found if each["kind"] == "turn"] == ["m1", "m9", "m4"]
    assert judged(path.read_bytes()) is None


class Told:
    """Stands in for the words to the hub."""

    def __init__(self) -> None:
        self.begun_: list[str] = []
        self.over: list[str] = []

    def begun(self, turn: LostTurn) -> None:
        """Note a turn that is announced."""
        self.begun_.append(turn.message_id)

    def ended(self, message_id: str) -> None:
        """Note one that is withdrawn."""
        self.over.append(message_id)

    failed = ended


@pytest.mark.parametrize("fate", ["written", "dropped", "failed"])
async def test_only_a_record_that_was_made_needs_no_withdrawal(
    tmp_path: Path, fate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record that the queue drops, or that can't be made, is counted already, not lost again."""
    settings = Settings(audit_file=tmp_path / "log", audit_turns="all", log_level="error")
    app = create_app(settings, engine_app=FakeEngine())
    audit, told = app.state.services.audit, Told()
    audit._under_way = told
    if fate == "dropped":
        monkeypatch.setattr(audit._writer, "offer", lambda *_: False)
    elif fate == "failed":
        monkeypatch.setattr(auditor, "turn_record", raised)
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi."}]}
    async with (
        lifespan_of(app),
        httpx.AsyncClient(
            transport=ASGIStreamTransport(app), base_url="http://localhost"
        ) as client,
    ):
        answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == httpx.codes.OK
    assert len(told.begun_) == 1
    assert told.over == ([] if fate == "written" else told.begun_)


def raised(*_: object) -> NoReturn:
    """Fails as a defect would."""
    raise RuntimeError


def test_a_gap_names_a_bounded_number_of_turns() -> None:
    """It counts all of them."""
    turns = [msgspec.structs.asdict(turn(number)) for number in range(MAX_NAMES + 2)]
    found = lost_record(turns, AT)
    assert (found["lost"], len(found["turns"])) == (MAX_NAMES + 2, MAX_NAMES)
    assert found["turns_omitted"] == 2
    assert "turns_omitted" not in lost_record(turns[:MAX_NAMES], AT)
