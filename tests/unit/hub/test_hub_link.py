"""The connection between a worker and its hub: questions, news, and what goes wrong."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import msgspec
import pytest
from support.hubs import hub, link
from support.waiting import until

from leyline_proxy.hub.link import HubFaultError, HubGoneError, HubLink
from leyline_proxy.hub.server import Handlers, Member
from leyline_proxy.hub.wire import MAX_FRAME, Method, Topic

DOUBLE = Method("test.double", bytes, bytes)
LATER = Method("test.later", int, int)
FAIL = Method("test.fail", type(None), type(None))
TELL = Method("test.tell", str, type(None))
NEWS = Topic("test.news", str)


class Echo:
    """A part of a hub that answers, waits, fails and passes on."""

    def __init__(self) -> None:
        self.members: list[Member] = []
        self.told: list[str] = []
        self.release = asyncio.Event()

    def handlers(self, handlers: Handlers) -> None:
        """Add the answers."""
        handlers.add(DOUBLE, lambda _, text: text * 2)
        handlers.add(LATER, lambda _, number: self._later(number))
        handlers.add(FAIL, lambda _, __: self._fail())
        handlers.add(TELL, self._tell)

    def left(self, member: Member) -> None:
        """Forget a worker."""
        if member in self.members:
            self.members.remove(member)

    async def _later(self, number: int) -> int:
        await self.release.wait()
        return -number

    def _fail(self) -> None:
        raise LookupError("a secret")

    def _tell(self, member: Member, text: str) -> None:
        if member not in self.members:
            self.members.append(member)
        self.told.append(text)
        for each in self.members:
            each.push(NEWS, text)


async def test_answers_find_their_questions(tmp_path: Path) -> None:
    """Questions of any size at once, quick and slow, each get their own answer."""
    echo = Echo()
    async with hub(tmp_path / "hub", echo), link(tmp_path / "hub") as worker:
        slow = [asyncio.create_task(worker.ask(LATER, number)) for number in range(5)]
        texts = [b"x" * size for size in (0, 1, 70_000, 3_000_000)]
        assert [await worker.ask(DOUBLE, text) for text in texts] == [text * 2 for text in texts]
        echo.release.set()
        assert await asyncio.gather(*slow) == [0, -1, -2, -3, -4]


async def test_a_failure_in_the_hub_costs_one_question(tmp_path: Path) -> None:
    """The worker gets the error's name and no more, and the next question its answer."""
    async with hub(tmp_path / "hub", Echo()), link(tmp_path / "hub") as worker:
        with pytest.raises(HubFaultError, match=r"^LookupError$"):
            await worker.ask(FAIL, None)
        assert await worker.ask(DOUBLE, b"a") == b"aa"


async def test_news_reach_every_worker(tmp_path: Path) -> None:
    """Each listener hears, in order, what a worker tells from another thread."""
    echo, heard = Echo(), list[str]()
    async with (
        hub(tmp_path / "hub", echo),
        link(tmp_path / "hub") as first,
        link(tmp_path / "hub", 1) as second,
    ):
        first.on(NEWS, heard.append)
        second.tell(TELL, "second")
        first.tell(TELL, "first")
        thread = threading.Thread(
            target=lambda: [first.tell_from_thread(TELL, str(n)) for n in range(3)]
        )
        thread.start()
        await until(lambda: [*filter(str.isdigit, heard)] == ["0", "1", "2"])
        thread.join()
    await until(lambda: not echo.members)


async def test_without_a_hub_questions_fail_at_once(tmp_path: Path) -> None:
    """An open question and a later one fail, and the worker hears that it is alone."""
    gone = asyncio.Event()
    async with hub(tmp_path / "hub", Echo()) as server:
        worker = HubLink(tmp_path / "hub", 0, "", gone.set)
        await worker.open()
        waiting = asyncio.create_task(worker.ask(LATER, 1))
        await asyncio.sleep(0)
        await server.aclose()
        with pytest.raises(HubGoneError):
            await waiting
        await asyncio.wait_for(gone.wait(), 5)
        with pytest.raises(HubGoneError):
            await worker.ask(DOUBLE, b"a")
        worker.tell(TELL, "nobody")
        assert not worker.tell_from_thread(TELL, "nobody")
        await worker.aclose()


@pytest.mark.parametrize(
    "sent",
    [
        (MAX_FRAME + 1).to_bytes(4, "big") + b"x",
        b"\x00\x00\x00\x03abc",
        b"\x00\x00\x00\x04" + msgspec.msgpack.encode([7, 7, 7]),
    ],
    ids=["too long", "garbage", "another kind"],
)
async def test_what_is_no_frame_ends_the_connection(tmp_path: Path, sent: bytes) -> None:
    """The hub closes such a connection, and serves the others."""
    async with hub(tmp_path / "hub", Echo()), link(tmp_path / "hub") as worker:
        reader, writer = await asyncio.open_unix_connection(tmp_path / "hub")
        writer.write(sent)
        assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()
        assert await worker.ask(DOUBLE, b"a") == b"aa"
