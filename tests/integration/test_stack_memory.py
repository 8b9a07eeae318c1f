"""Memory of stacks in one process: a stopped one leaves no engine."""

from __future__ import annotations

import gc
import threading
import time
from weakref import ref

import httpx
import pytest

from leyline_lab.engines.stack import CHAT_PATH, StackOptions, running_stack
from leyline_replay.service import EngineService

BODY = {
    "model": "leyline-recall",
    "messages": [{"role": "user", "content": "Hello"}],
    "max_tokens": 2,
}


def test_a_stopped_stack_leaves_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine and its pool of KV are gone with the stack, after it has served and was read."""
    found: list[ref[EngineService]] = []
    begin = EngineService.__init__

    def noted(self: EngineService, *given: object, **named: object) -> None:
        found.append(ref(self))
        begin(self, *given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(EngineService, "__init__", noted)
    with running_stack(StackOptions(pool_tokens=1024), splice=True) as stack:
        answer = httpx.post(f"{stack.origin}{CHAT_PATH}", json=BODY, timeout=60)
        assert answer.status_code == 200, answer.text
        assert len(stack.last_prompt())
        (service,) = found
        assert service() is not None
    # A thread that ends may hold it for a moment; what holds it for longer is shown.
    deadline = time.monotonic() + 20
    while service() is not None and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.05)
    held = [type(each) for each in gc.get_referrers(service())] if service() is not None else []
    assert service() is None, (held, threading.enumerate())
