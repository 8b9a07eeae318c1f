"""A session that moves between engines while its turns are under way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec
from support.fake_engine import CAPABILITY, MODEL, Answer, FakeEngine, chat_json, forgotten
from support.stack import serving

from leyline_proxy.http.app import create_app
from leyline_proxy.settings import Settings
from leyline_proxy.upstream.rendezvous import ranked

CHAT = "/v1/chat/completions"
REDACT = "redact:pattern='key=[0-9]+',replacement='[gone]'"
ASKED = [{"role": "user", "content": "key=7391"}]
ANSWERED = [*ASKED, {"role": "assistant", "content": "Hello."}, {"role": "user", "content": "go"}]
SESSION = next(f"s{n}" for n in range(99) if ranked(f"s{n}", {"a": 1.0, "b": 1.0})[0] == "a")


@dataclass
class Pair:
    """Two engines behind a proxy."""

    engines: dict[str, FakeEngine]
    app: Any
    origin: str

    def drain(self, name: str, draining: bool) -> None:
        self.app.state.services.pool.get(name).draining = draining

    def ask(self, messages: list[dict[str, Any]], **members: Any) -> httpx.Response:
        return httpx.post(
            f"{self.origin}{CHAT}",
            json={"model": MODEL, "messages": messages, **members},
            headers={"x-leyline-session": SESSION},
            timeout=20,
        )

    def forgets(self, name: str) -> int:
        """Requests of its own by which an engine was told to forget."""
        return sum(b'"content":"."' in body for body in self.engines[name].bodies)


@contextmanager
def pair(**settings: Any) -> Iterator[Pair]:
    with ExitStack() as stack:
        engines, origins = {}, {}
        for name in ("a", "b"):
            engine = FakeEngine(capability=msgspec.structs.replace(CAPABILITY, instance=f"{name}1"))
            engine.receipt = forgotten
            engines[name], origins[name] = engine, stack.enter_context(serving(engine))
        app = create_app(
            Settings(upstreams=origins, log_level="error", handshake_interval_s=0.2, **settings)
        )
        yield Pair(engines, app, stack.enter_context(serving(app)))


def eventually(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "it never came to be"
        time.sleep(0.02)


def test_a_forget_reaches_an_engine_that_is_still_at_work_on_an_earlier_turn() -> None:
    """The turn isn't settled when the session moves; what it reads is forgotten all the same."""
    with pair() as found:
        found.drain("a", True)
        assert found.ask(ASKED).status_code == 200
        found.drain("a", False)
        slow = found.engines["a"]
        slow.answers = [chat_json()]
        slow.answers[0].pause_s = 1.0
        earlier = threading.Thread(target=found.ask, args=(ANSWERED,))
        earlier.start()
        eventually(lambda: slow.bodies)
        ((_, entry),) = found.app.state.services.store._entries.items()
        assert f"{'f' * 16}@a1" in entry.session.places
        found.drain("a", True)
        assert found.ask(ANSWERED, leyline={"policy": REDACT}).status_code == 200
        earlier.join()
        eventually(lambda: found.forgets("a"))


def test_a_forget_of_a_turn_whose_client_left_is_carried_as_well() -> None:
    """The engine was given the demand, so the others owe it, whoever waits for the answer."""
    with pair() as found:
        assert found.ask(ASKED).status_code == 200
        found.drain("a", True)
        hanging = found.engines["b"]
        hanging.answers = [Answer(hangs=True)]
        with ExitStack() as stack:
            client = stack.enter_context(httpx.Client(timeout=0.5))
            with suppress(httpx.ReadTimeout):
                client.post(
                    f"{found.origin}{CHAT}",
                    json={"model": MODEL, "messages": ANSWERED, "leyline": {"policy": REDACT}},
                    headers={"x-leyline-session": SESSION},
                )
        eventually(lambda: found.forgets("a"))


def test_losses_of_account_are_forgotten_at_every_engine() -> None:
    """What has no name in the account may have been read anywhere."""
    with pair() as found:
        assert found.ask(ANSWERED).status_code == 200
        store = found.app.state.services.store
        ((_, entry),) = store._entries.items()
        assert set(entry.session.places) == {f"{'f' * 16}@a1", f"{'f' * 16}@b1"}
        assert found.ask(ANSWERED, leyline={"policy": REDACT}).status_code == 200
        eventually(lambda: found.forgets("b"))
