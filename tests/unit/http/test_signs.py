"""Signs of life to a waiting client."""

from __future__ import annotations

import asyncio

import pytest

from leyline_proxy.http import signs
from leyline_proxy.http.signs import signing


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Signs come after hundredths of a second."""
    monkeypatch.setattr(signs, "FIRST_SIGN_S", 0.02)
    monkeypatch.setattr(signs, "SIGN_S", 0.01)


async def test_work_that_takes_long_gives_signs() -> None:
    """They end with the work; work that is done at once gives none, and neither does any without a
    client to see them."""
    given: list[str] = []

    async def sign() -> None:
        given.append("sign")

    async def work(seconds: float) -> str:
        await asyncio.sleep(seconds)
        return "done"

    assert await signing(work(0), sign) == "done"
    assert await signing(work(0.1), None) == "done"
    assert given == []
    assert await signing(work(0.2), sign) == "done"
    assert len(given) >= 2
    before = len(given)
    await asyncio.sleep(0.05)
    assert len(given) == before


async def test_errors_pass_and_work_ends_with_its_caller() -> None:
    """An error of the work or of a sign is the caller's, and nothing continues after it."""
    ended: list[str] = []

    async def work(seconds: float, error: Exception | None = None) -> None:
        try:
            await asyncio.sleep(seconds)
            if error is not None:
                raise error
        finally:
            ended.append("work")

    async def broken() -> None:
        raise ConnectionError

    with pytest.raises(ValueError, match="wrong"):
        await signing(work(0.01, ValueError("wrong")), None)
    for sign, error in ((broken, ConnectionError), (None, TimeoutError)):
        with pytest.raises(error):
            async with asyncio.timeout(1):
                await signing(work(60), sign)
    assert ended == ["work"] * 3
