"""Texts that a model wrote after reading what is forgotten, over the whole stack: named in the
account, and forgotten by that name."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from support.agent_history import agent_history
from support.engine_memory import holds_text, learn_words

from leyline_engine.contract import sign_bytes
from leyline_lab.fidelity.recall_prompts import draw_prompt
from leyline_lab.fidelity.recall_task import Note
from leyline_lab.stand_ins.serving import check_clean, serving
from leyline_proxy.http.app import create_app
from leyline_proxy.settings import Settings
from leyline_proxy.upstream.embedded import create_embedded_engine

WORD = "key=7391"
RESULT = 3
"""Index of the result that holds the word."""
REMOVED = [{"message": RESULT, "replacement": "[removed]", "mode": "forget"}]
PATIENCE_S = 20.0

Talk = list[dict[str, Any]]


@pytest.fixture(scope="module")
def engine() -> Iterator[tuple[Starlette, str]]:
    """An engine that outlives proxies: the application and its origin."""
    app = create_embedded_engine("replay", {"device": "cpu", "pool_tokens": 65_536})
    with serving(app) as origin:
        learn_words(app, origin)
        yield app, origin
    check_clean(app)


@contextmanager
def proxy(origin: str, **given: Any) -> Iterator[httpx.Client]:
    """A client of a proxy that knows no session yet."""
    app = create_app(Settings(upstream=origin, log_level="error", **given))
    with serving(app) as address, httpx.Client(base_url=address, timeout=60) as client:
        yield client


def ledger(client: httpx.Client, session: str) -> dict[str, Any]:
    """The session's ledger."""
    answer = client.get(f"/v1/leyline/sessions/{session}/ledger")
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def task(name: str) -> Talk:
    """A list whose result holds the word, and that asks for a summary of it."""
    messages = agent_history(1, f"Look into {name}.", secret=WORD)
    return [*messages, {"role": "user", "content": f"Sum up {name}."}]


def ask(
    client: httpx.Client, session: str, messages: Talk, count: int = 12, **options: Any
) -> tuple[dict[str, Any], str]:
    """The account of a turn, and its answer."""
    body = {"model": "leyline-recall", "temperature": 0, "max_tokens": count, "messages": messages}
    answer = client.post(
        "/v1/chat/completions",
        json=body | {"leyline": options},
        headers={"x-leyline-session": session},
    )
    assert answer.status_code == 200, answer.text
    document = answer.json()
    return document["leyline"], document["choices"][0]["message"]["content"]


def quarantine(client: httpx.Client, session: str, **body: Any) -> dict[str, Any]:
    """The account of a quarantine on demand."""
    answer = client.post(f"/v1/leyline/sessions/{session}/quarantine", json=body)
    assert answer.status_code == 200, answer.text
    account: dict[str, Any] = answer.json()
    return account


def knows(app: Starlette, session: str, text: str) -> bool:
    """Return True if the engine holds KV of the text for a session, once it rests."""
    service = app.state.service
    deadline = time.monotonic() + PATIENCE_S
    while service._engine.stats().in_flight:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    found: bool = holds_text(app, session, text)
    return found


def continued(messages: Talk, answer: str, words: str) -> Talk:
    """The list with the answer, and the next message of the user."""
    said = {"role": "assistant", "content": answer}
    return [*messages, said, {"role": "user", "content": words}]


def test_an_answer_with_a_secret_is_named_and_goes_by_its_name(
    engine: tuple[Starlette, str], tmp_path: Path
) -> None:
    """After the secret's forget, the account names what was written from it; put into quarantine
    by these names, no text is in a prompt or in the cache any more."""
    app, origin = engine
    log = tmp_path / "audit.jsonl"
    drawn = draw_prompt(Random(5), Note.KEYS, 2)
    removed = [{**REMOVED[0], "message": drawn.output}]
    with proxy(origin, audit_file=log) as client:
        first = [dict(message) for message in drawn.messages]
        _, answer = ask(client, "s", first)
        assert answer == drawn.answer  # the model has read it there
        second = continued(first, answer, "Write a note.")
        _, note = ask(client, "s", second)
        third = continued(second, note, "Go on.")
        told, last = ask(client, "s", third, edits=removed)
        assert told["forgot"]["result"] == "erased"
        count = len(first)
        shown = [(each["message"], each["role"], each["read"]) for each in told["derived"]]
        assert shown[-3:] == [
            (count, "assistant", "direct"),
            (count + 2, "assistant", "direct"),
            (None, "assistant", "transitive"),
        ]
        assert knows(app, "s", answer)  # the control: its copy is still in the prompt
        names = [each["span"] for each in told["derived"]]
        account = quarantine(client, "s", spans=names, reason="secret")
        assert (account["forgot"]["result"], account["derived"]) == ("erased", [])
        told, _ = ask(client, "s", continued(third, last, "And now?"), edits=removed)
        assert {each["span"] for each in told["derived"]}.isdisjoint(names)
        assert not knows(app, "s", answer)
        assert knows(app, "s", "[quarantined: verdict]")
    records = [json.loads(line) for line in log.read_text().splitlines()]
    turn = next(each for each in records if each["kind"] == "turn")
    assert [each["span"] for each in turn["derived"]] == names
    verdicts = [each for each in records if each["kind"] == "quarantine"]
    assert len(verdicts) == len(names)
    assert [each.get("derived") for each in verdicts] == [[], *[None] * (len(names) - 1)]


def test_a_quarantine_names_what_was_written_from_it(engine: tuple[Starlette, str]) -> None:
    """The answer of the route has the same members as a turn's account."""
    _, origin = engine
    with proxy(origin) as client:
        first = task("quarantine")
        _, summary = ask(client, "q", first)
        second = continued(first, summary, "Go on.")
        ask(client, "q", second)
        account = quarantine(client, "q", messages=[RESULT])
        assert [(e["message"], e["read"]) for e in account["derived"]] == [
            (5, "direct"),
            (None, "direct"),
        ]
        assert account["derived_complete"] is True
        both = quarantine(client, "q", messages=[RESULT, 5])
        assert [each["message"] for each in both["derived"]] == [None]


def test_what_a_proxy_cannot_know_is_unknown(engine: tuple[Starlette, str]) -> None:
    """A proxy without the session's memory names what came after the secret as unknown, and never
    gives an empty list as complete."""
    _, origin = engine
    with proxy(origin) as client:
        first = task("restart")
        _, summary = ask(client, "r", first)
    second = continued(first, summary, "Go on.")
    with proxy(origin) as client:
        told, _ = ask(client, "r", second, edits=REMOVED)
        assert [(e["message"], e["read"]) for e in told["derived"]][:1] == [(5, "unknown")]
        assert told["derived_complete"] is False


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_every_api_has_it(engine: tuple[Starlette, str], path: str, stream: bool) -> None:
    """The account has the texts in each API, as a stream and as one answer."""
    _, origin = engine
    session = f"{path}-{stream}"
    said = [
        {"role": "user", "content": f"The word of {session} is {WORD}."},
        {"role": "assistant", "content": "I see."},
        {"role": "user", "content": "Go on."},
    ]
    body: dict[str, Any] = {"model": "leyline-recall", "stream": stream}
    body["input" if path == "/v1/responses" else "messages"] = said
    body["max_output_tokens" if path == "/v1/responses" else "max_tokens"] = 2
    with proxy(origin) as client:
        answer = client.post(
            path,
            json=body | {"leyline": {"edits": [{**REMOVED[0], "message": 0}]}},
            headers={"x-leyline-session": session},
        )
    assert answer.status_code == 200, answer.text
    assert '"derived":[{"span":"' in answer.text.replace(" ", "")
    assert '"read":"unknown"' in answer.text.replace(" ", "")
    assert '"derived_complete":false' in answer.text.replace(" ", "")


def test_the_ledger_says_what_the_engine_knows() -> None:
    """Spans that a splice moved KV past have lineages as readers, in the engine's own count; an
    engine that can't be asked, or not by this proxy, is named and has no numbers."""
    secret = "a secret of sixteen characters"
    options = {"device": "cpu", "pool_tokens": 65_536, "hints_secret": secret}
    messages = agent_history(2, "Look into the ledger.", secret=WORD)
    app = create_embedded_engine("replay", options)
    with serving(app) as origin, proxy(origin, hints_secret=secret) as client:
        ask(client, "s", messages)
        found = ledger(client, "s")
        (engine,) = found["engines"]
        assert (engine["answer"], engine["pending"], engine["owed"]) == ("given", 0, False)
        (held,) = found["spans"][RESULT]["engines"]
        assert (held["turns"], held["lineages"]) == (1, 0)
        assert held["from"] == found["spans"][RESULT]["read_by"][0]["from"]
        cut = [{"message": RESULT, "replacement": "[cut]", "mode": "amortize"}]
        told, _ = ask(client, "s", continued(messages, "Well.", "Go on."), edits=cut)
        assert told["tokens"]["spliced"] > 0
        (moved,) = ledger(client, "s")["spans"][RESULT]["engines"]
        assert (moved["turns"], moved["lineages"]) == (2, 1)
        assert 0 < moved["from"] <= held["from"]
        question = {"scope": "default", "session": "s", "spans": ["t0"]}
        unsigned = httpx.post(f"{origin}/leyline/ledger", json=question)
        assert unsigned.status_code == 403
        signed = {"x-leyline-signature": sign_bytes(b"{}", secret)}
        bad = httpx.post(f"{origin}/leyline/ledger", content=b"{}", headers=signed)
        assert bad.status_code == 400
        quarantine(client, "s", messages=[RESULT])
        assert ledger(client, "s")["engines"] == []  # none holds anything of it


def test_an_engine_out_of_reach_has_no_numbers() -> None:
    """It is named as unreachable, and every number of it is null."""
    app = create_embedded_engine("replay", {"device": "cpu", "pool_tokens": 65_536})
    with ExitStack() as stack:
        origin = stack.enter_context(serving(app))
        engine = stack.pop_all()
        with proxy(origin) as client:
            ask(client, "s", task("reach"))
            engine.close()
            found = ledger(client, "s")
            (named,) = found["engines"]
            assert (named["answer"], named["pending"]) == ("unreachable", None)
            for span in found["spans"]:
                (numbers,) = span["engines"]
                assert {numbers[name] for name in ("turns", "lineages", "from")} == {None}
