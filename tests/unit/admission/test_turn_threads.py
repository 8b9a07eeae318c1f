"""The threads of turns: no tenant's work holds up another's."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
from support.fake_engine import MODEL, FakeEngine, proxy_before

from leyline_policies import Message
from leyline_proxy.admission.turn_threads import TurnThreads
from leyline_proxy.model.undeclared import UndeclaredRules
from leyline_proxy.tenants import Tenant
from leyline_proxy.tenants.tenant import TenantLimits

CHAT = "/v1/chat/completions"


def tenant(name: str, most: int | None = 100) -> Tenant:
    """One of several, or the only one (None)."""
    limits = TenantLimits(max_concurrent=most)
    return Tenant(name, (), UndeclaredRules(), allow_request_policy=True, limits=limits)


class Blocking:
    """Work that ends only when it is released."""

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.end = threading.Event()
        self.count = 0

    def __call__(self) -> None:
        self.count += 1
        self.begun.release()
        self.end.wait()

    async def begins(self, times: int) -> None:
        """Wait until it has begun so many times more."""
        for _ in range(times):
            assert await asyncio.to_thread(self.begun.acquire, timeout=10)


@pytest.fixture
async def blocking() -> AsyncIterator[Blocking]:
    """Work that is released at the end."""
    work = Blocking()
    yield work
    work.end.set()


async def test_a_tenant_has_at_most_its_share_of_the_threads(blocking: Blocking) -> None:
    """Another's work runs at once, however much of the first one's runs or waits; a tenant that is
    alone may have all."""
    threads = TurnThreads(4)
    red = [asyncio.create_task(threads.run(tenant("red"), blocking)) for _ in range(9)]
    await blocking.begins(2)
    assert await asyncio.wait_for(threads.run(tenant("blue"), lambda: "blue"), 10) == "blue"
    assert blocking.count == 2
    alone, only = Blocking(), tenant("only", None)
    others = TurnThreads(4)
    tasks = [asyncio.create_task(others.run(only, alone)) for _ in range(5)]
    await alone.begins(4)
    alone.end.set()
    blocking.end.set()
    await asyncio.gather(*red, *tasks)
    assert blocking.count == 9


async def test_work_that_nobody_waits_for_keeps_its_place(blocking: Blocking) -> None:
    """Hanging up frees no thread that still works, or a client could take any number."""
    threads = TurnThreads(4)
    gone = [asyncio.create_task(threads.run(tenant("red"), blocking)) for _ in range(4)]
    await blocking.begins(2)
    for task in gone[:3]:  # two that run, and one that waits
        task.cancel()
    for task in gone[:3]:
        with contextlib.suppress(asyncio.CancelledError):
            await task
    for _ in range(5):
        assert await threads.run(tenant("blue"), lambda: True)
    assert blocking.count == 2
    blocking.end.set()
    await gone[3]
    assert blocking.count == 3


async def test_an_error_frees_the_place() -> None:
    """The next work runs."""
    threads = TurnThreads(1)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            await threads.run(tenant("red"), lambda: 1 // 0)
    assert await threads.run(tenant("red"), lambda: 1) == 1


async def test_one_tenants_policies_hold_no_other_tenants_turn(
    monkeypatch: pytest.MonkeyPatch, blocking: Blocking
) -> None:
    """While all that the red tenant may run is running, a blue turn with a policy is answered."""

    class Blocks:
        name, mode, trusted = "blocks", "amortize", True

        def transform(self, messages: list[Message], turn_idx: int) -> list[Message]:
            if messages[0]["content"] == "block":
                blocking()
            return messages

    monkeypatch.setattr("leyline_proxy.tenants.tenant.load_pipeline", lambda _: (Blocks(),))
    engine = FakeEngine()
    keys = tuple(f"{name}:{name}-key" for name in ("red", "blue"))
    settings: dict[str, Any] = {"policy": "patched", "api_keys": keys, "log_level": "error"}
    async with proxy_before(engine, **settings) as client:

        async def ask(who: str, words: str) -> int:
            body = {"model": MODEL, "messages": [{"role": "user", "content": words}]}
            headers = {"authorization": f"Bearer {who}-key"}
            return (await client.post(CHAT, json=body, headers=headers)).status_code

        red = [asyncio.create_task(ask("red", "block")) for _ in range(40)]
        await blocking.begins(2)
        assert await asyncio.wait_for(ask("blue", "go"), 20) == 200
        assert 0 < blocking.count < 40
        blocking.end.set()
        assert {*await asyncio.gather(*red)} == {200}
