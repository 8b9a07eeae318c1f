"""Calls into foreign code that may hang."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import time
from functools import partial

import pytest

from leyline_proxy.edits.prepare import PolicyTimeoutError
from leyline_proxy.edits.time_limit import TimeLimit

TENANT = "red"


def _spin() -> None:
    while True:
        pass


def test_a_call_gives_what_it_returns_or_raises() -> None:
    """The limit is not noticed by what keeps to it."""
    limit = TimeLimit(5.0)
    assert limit(TENANT, lambda: 3) == 3
    with pytest.raises(KeyError, match="its own"):
        limit(TENANT, lambda: {}["its own"])


def test_a_call_that_hangs_in_python_is_stopped() -> None:
    """The caller continues in time, and no thread is left."""
    limit = TimeLimit(0.05, max_stuck=1)
    for _ in range(3):  # more often than calls may hang: none does
        with pytest.raises(PolicyTimeoutError):
            limit(TENANT, _spin)
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        if not any(thread.name == "leyline-policy" for thread in threading.enumerate()):
            break
        time.sleep(0.01)
    assert not any(thread.name == "leyline-policy" for thread in threading.enumerate())


def test_calls_that_cannot_be_stopped_shut_the_door_until_they_end() -> None:
    """While one hangs, the tenant's next isn't made; when it has ended, calls go through again."""
    limit, release = TimeLimit(0.05, max_stuck=1), threading.Event()
    with pytest.raises(PolicyTimeoutError):
        limit(TENANT, release.wait)
    made: list[int] = []
    with pytest.raises(PolicyTimeoutError):
        limit(TENANT, lambda: made.append(1))
    assert made == []
    release.set()
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            limit(TENANT, lambda: made.append(2))
            break
        except PolicyTimeoutError:
            time.sleep(0.01)
    assert made[:1] == [2]


def test_calls_that_hang_cost_no_other_tenant_its_own() -> None:
    """Another tenant's calls are made, however many of the first one's hang; so is the first call
    of a tenant where all that may hang do, but not one more beside what hangs already."""
    limit, release = TimeLimit(0.05, max_stuck=2, max_in_all=3), threading.Event()

    def hangs(tenant: str) -> None:
        with pytest.raises(PolicyTimeoutError, match="too long"):
            limit(tenant, release.wait)

    try:
        hangs("red"), hangs("red")
        with pytest.raises(PolicyTimeoutError, match="too many"):
            limit("red", lambda: 1)
        assert limit("blue", lambda: 2) == 2
        hangs("blue")
        with pytest.raises(PolicyTimeoutError, match="too many"):
            limit("blue", lambda: 3)
        assert limit("green", lambda: 4) == 4
    finally:
        release.set()


def test_a_stop_that_comes_late_hurts_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that end about when they are stopped leave other threads alone, and leave none
    running."""
    hurt: list[object] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: hurt.append(args.exc_type))
    monkeypatch.setattr(sys, "unraisablehook", lambda args: hurt.append(args.exc_type))
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    # A finaliser that the collector runs in a call's thread would take the stop for the call.
    gc.collect()
    gc.disable()
    limit, ended = TimeLimit(0.001), []

    def busy(seconds: float) -> None:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            pass

    def many() -> None:
        for number in range(150):
            with contextlib.suppress(PolicyTimeoutError):
                limit(TENANT, partial(busy, 0.001 + (number % 7 - 3) * 1e-5))
        ended.append(1)

    callers = [threading.Thread(target=many, daemon=True) for _ in range(6)]
    try:
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join(30)
    finally:
        sys.setswitchinterval(interval)
        gc.enable()
    assert len(ended) == len(callers)
    assert hurt == []


def test_what_would_end_the_process_ends_the_call() -> None:
    """A call that leaves with SystemExit has failed, and no more."""
    with pytest.raises(RuntimeError, match="SystemExit"):
        TimeLimit(5.0)(TENANT, sys.exit)
