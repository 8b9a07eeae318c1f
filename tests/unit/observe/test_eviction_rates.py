"""Counting evictions beside the turns: order, bounds, forgets."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from eviction_talks import Talk, evicted, text_with
from support.metrics_page import value_of
from support.waiting import until

from leyline_engine.contract import ProofPlace
from leyline_proxy.observe import eviction_rates
from leyline_proxy.observe.eviction_rates import (
    EvictionBook,
    EvictionRates,
    SessionEvictions,
    Tokens,
    Work,
)
from leyline_proxy.telemetry.metrics import Metrics

RED, BLUE = ("red", "s"), ("blue", "s")
PART = evicted(text_with(1, 2, 3), 30)


@asynccontextmanager
async def counting() -> AsyncIterator[tuple[EvictionRates, EvictionBook, Metrics]]:
    """Rates that stop at the end."""
    metrics, book = Metrics(), EvictionBook()
    rates = EvictionRates(metrics, book)
    try:
        yield rates, book, metrics
    finally:
        await rates.aclose()


def evicting(entry: SessionEvictions) -> Tokens:
    """A turn that evicts a text."""
    talk = Talk()
    talk.result(PART.text)
    return entry.turn(talk.turn([PART]))


class Slow:
    """Work that takes until it is let go."""

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()

    def __call__(self, entry: SessionEvictions) -> Tokens:
        """Evict a text, slowly."""
        self.begun.set()
        assert self.go_on.wait(10)
        return evicting(entry)


async def test_series_of_a_policy_begin_together() -> None:
    """With its first eviction a policy has all three series, so that the first recall is an
    increase."""
    async with counting() as (rates, _, metrics):
        rates.add(Work(RED, evicting, first=True, demands=0))
        await until(lambda: value_of(metrics.evicted_tokens))
        assert metrics.evicted_tokens.labels("red", "cut")._value.get() == 30
        for counter in (metrics.evicted_recalled_tokens, metrics.evicted_quoted_tokens):
            assert [s.labels for m in counter.collect() for s in m.samples] == [
                {"tenant": "red", "policy": "cut"}
            ]
        rates.add(Work(RED, lambda entry: entry.recalled([PART.address])))
        await until(lambda: value_of(metrics.evicted_recalled_tokens) == 30)


async def test_a_forget_waits_for_what_is_under_way() -> None:
    """When a forget returns, no thread has the session's text, its waiting turns are gone, and
    nothing of them is counted; other sessions go on."""
    async with counting() as (rates, book, metrics):
        slow = Slow()
        rates.add(Work(RED, slow, first=True, demands=0))
        await until(slow.begun.is_set)
        rates.add(Work(RED, evicting, demands=0))
        rates.add(Work(BLUE, evicting, first=True, demands=0))
        before = book.get(RED)
        threading.Timer(0.1, slow.go_on.set).start()
        await rates.forget(*RED, "t", 0)
        assert slow.go_on.is_set() and before is not None and before.texts == 1
        assert await rates.left(*RED, 1) == (ProofPlace(place="quotes", scanned=0),)
        # It was planned before the forget.
        rates.add(Work(RED, evicting, demands=0))
        await until(lambda: value_of(metrics.evicted_tokens))
        await until(lambda: rates._task is None)
        assert {
            s.labels["tenant"] for m in metrics.evicted_tokens.collect() for s in m.samples
        } == {"blue"}
        entry = book.get(RED)
        assert entry is not None and entry.texts == 0


async def test_text_that_a_forget_missed_is_found() -> None:
    """A proof finds text from before its forget if nothing removed it, and none from after it."""
    async with counting() as (rates, _, metrics):
        rates.add(Work(RED, evicting, first=True, demands=0))
        await until(lambda: value_of(metrics.evicted_tokens))
        assert await rates.left(*RED, 1) == (ProofPlace(place="quotes", scanned=1, survivors=1),)
        await rates.forget(*RED, "t", 0)
        rates.add(Work(RED, lambda entry: entry.turn(Talk().turn()), demands=1))
        rates.add(Work(RED, evicting, demands=1))
        await until(lambda: value_of(metrics.evicted_tokens) == 60)
        assert await rates.left(*RED, 1) == (ProofPlace(place="quotes", scanned=1),)
        await rates.delete(*RED)
        assert await rates.left(*RED, 1) == (ProofPlace(place="quotes"),)


async def test_a_deletion_waits_too() -> None:
    """A deleted session has no text in any thread, and none is counted."""
    async with counting() as (rates, book, metrics):
        slow = Slow()
        rates.add(Work(RED, slow, first=True, demands=0))
        await until(slow.begun.is_set)
        rates.add(Work(RED, evicting, demands=0))
        threading.Timer(0.05, slow.go_on.set).start()
        await rates.delete(*RED)
        assert slow.go_on.is_set()
        await until(lambda: rates._task is None)
        assert (len(book), value_of(metrics.evicted_tokens)) == (0, 0)


async def test_too_much_work_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a thread is busy, a bounded number of turns waits."""
    monkeypatch.setattr(eviction_rates, "MOST_WAITING", 3)
    async with counting() as (rates, book, _):
        slow = Slow()
        rates.add(Work(RED, slow, first=True, demands=0))
        await until(slow.begun.is_set)
        for number in range(9):
            rates.add(Work(("blue", f"s-{number}"), evicting, first=True, demands=0))
        slow.go_on.set()
        await until(lambda: rates._task is None)
        assert len(book) == 4


async def test_an_error_costs_one_session() -> None:
    """Work that fails drops its session, and other sessions are counted."""

    def fails(entry: SessionEvictions) -> Tokens:
        raise RuntimeError("no")

    async with counting() as (rates, book, metrics):
        rates.add(Work(RED, fails, first=True, demands=0))
        rates.add(Work(BLUE, evicting, first=True, demands=0))
        await until(lambda: value_of(metrics.evicted_tokens) == 30)
        assert book.get(RED) is None
