"""The cost of a turn on a real SGLang: every token that was cached and is not now has its cause."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.bust_accounts import causes, check
from support.sglang_stack import (
    API_KEY,
    HINTS_SECRET,
    MODEL,
    PYTHON,
    Proxies,
    SglangServer,
)

from leyline_replay.models.trained import THINKING_MODEL_NAME, trained_model_dir

AMORTIZED = {"undeclared": {"tool": "amortize"}}
TURNS = 4
ENDS = 8
"""Tokens of the template between two messages, which count with the one or the other."""
SHORT = 32
"""Shorter runs aren't copied."""
POOL = 6144
ASK = {"role": "user", "content": "Summarize."}
GONE = {"message": 3, "mode": "forget", "replacement": "gone"}
NEXT = {"role": "user", "content": "Go on with the next one, please."}
NO_MARKS = {"logit_bias": {str(token): -100 for token in (0, 1, 2)}, "frequency_penalty": 1}
"""An answer in plain text: without the template's marks, and seldom twice the same."""
Chat = list[dict[str, Any]]


def words(seed: str, lines: int) -> str:
    """A text that no other has a passage of."""
    rng = random.Random(seed)
    made = (
        " ".join("".join(rng.choices("aeilmnorst", k=5)) for _ in range(6)) for _ in "." * lines
    )
    return ".\n".join(made)


def chat(count: int, tag: str) -> Chat:
    """A call and its result per turn, all in words of their own."""
    messages: Chat = [
        {"role": "system", "content": words(f"{tag} system", 4)},
        {"role": "user", "content": words(f"{tag} task", 2)},
    ]
    for turn in range(count):
        function = {"name": "shell", "arguments": json.dumps({"command": words(f"{tag}{turn}", 1)})}
        call = {"id": f"c{turn}", "type": "function", "function": function}
        result = words(f"{tag} result {turn}", 6)
        messages += [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"c{turn}", "content": result},
        ]
    return messages


def edited(count: int, tag: str, lines: int = 1, at: int = 3) -> Chat:
    """The conversation with an old result in other words."""
    messages = chat(count, tag)
    messages[at] = {**messages[at], "content": words(f"{tag} instead {at}", lines)}
    return messages


@dataclass
class Session:
    """One session before an engine."""

    http: httpx.Client
    engine: str
    name: str
    model: str = MODEL

    def ask(self, messages: Chat, **members: Any) -> tuple[str, dict[str, Any]]:
        """The answer and account of a turn, which agrees with the engine's own usage."""
        body = {"model": self.model, "messages": messages, "max_tokens": 2, "ignore_eos": True}
        answer = self.http.post(
            "/v1/chat/completions",
            json=body | {"temperature": 0, **members},
            headers={"x-leyline-session": self.name},
        )
        assert answer.status_code == 200, answer.text
        document = answer.json()
        account, usage = document["leyline"], document["usage"]
        check(account)
        tokens = account["tokens"]
        served = tokens["prefix"] + tokens["spliced"] + tokens["reused"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == served
        return str(document["choices"][0]["message"]["content"]), account

    def grow(self, turns: int = TURNS, **members: Any) -> None:
        """The session's turns before anything is edited."""
        for turn in range(1, turns):
            _, account = self.ask(chat(turn, self.name), **members)
            assert account["busts"]["lost_tokens"] == 0

    def length(self, messages: Chat) -> int:
        """The number of a prompt's tokens, as the engine renders it."""
        answer = httpx.post(
            f"{self.engine}/tokenize",
            json={"model": self.model, "messages": messages},
            headers={"authorization": f"Bearer {API_KEY}"},
        )
        return len(answer.json()["tokens"])


Begin = Callable[[str], Session]


@pytest.fixture(scope="module")
def begin(engine: SglangServer, origin: str) -> Iterator[Begin]:
    """Begins a session, by its name."""
    with httpx.Client(base_url=origin, timeout=60) as http:
        yield lambda name: Session(http, engine.base_url, name)


@pytest.mark.parametrize(
    ("tag", "mode", "cause", "members"),
    [
        ("exact", "exact", "undeclared", {}),
        ("forget", "forget", "declared", {"edits": [GONE]}),
    ],
)
def test_an_edit_pays_for_all_after_it(
    begin: Begin, tag: str, mode: str, cause: str, members: Any
) -> None:
    """All that the turn before had after the changed message is lost to it, token by token."""
    session = begin(f"busts-{tag}")
    session.grow()
    before = chat(TURNS - 1, session.name)
    messages = chat(TURNS, session.name) if members else edited(TURNS, session.name)
    _, account = session.ask(messages, leyline=members)
    (entry,) = account["busts"]["entries"]
    named = (entry["cause"], entry["mode"], entry["message"], entry["tool"], entry["why"])
    assert named == (cause, mode, 3, "shell", mode)
    after = session.length(before) - session.length(before[:4])
    assert entry["tokens"] == pytest.approx(after, abs=ENDS)
    assert entry["messages"] == [5, len(before) - 1]
    _, account = session.ask([*messages, *chat(TURNS + 1, session.name)[-2:]], leyline=members)
    assert causes(account) == {}


def test_a_splice_leaves_its_boundary_to_pay(begin: Begin) -> None:
    """A long replacement is new, though a row of its own computed it; only what the engine computed
    again beside it is lost."""
    session = begin("busts-amortize")
    session.grow()
    messages = edited(TURNS, session.name, lines=12)
    _, account = session.ask(messages, leyline={**AMORTIZED, "boundary": 20})
    (entry,) = account["busts"]["entries"]
    assert (account["outcome"], entry["why"]) == ("spliced", "computed_again")
    assert 20 <= entry["tokens"] < 20 + SHORT
    assert entry["message"] == 3
    assert account["busts"]["new_tokens"] > 200
    _, account = session.ask([*messages, *chat(TURNS + 1, session.name)[-2:]], leyline=AMORTIZED)
    assert causes(account) == {}
    shown = session.http.get("/metrics").text.splitlines()
    surplus = [line for line in shown if line.startswith("leyline_cache_discrepancy_tokens_total{")]
    assert surplus and all(line.endswith(" 0.0") for line in surplus), surplus


def test_a_copy_that_the_engine_left_out_is_named(begin: Begin) -> None:
    """Two edits close to one another have too little between them for a copy: the second pays."""
    session = begin("busts-short")
    session.grow()
    messages = edited(TURNS, session.name)
    messages[5] = {**messages[5], "content": "nothing"}
    (call,) = messages[6]["tool_calls"]
    call = {**call, "function": call["function"] | {"name": "sh"}}
    messages[6] = {**messages[6], "tool_calls": [call]}
    rules = {"tool": "amortize", "assistant": "amortize"}
    _, account = session.ask(messages, leyline={"undeclared": rules})
    (entry,) = account["busts"]["entries"]
    assert (entry["message"], entry["why"]) == (5, "computed_again"), account["edits"]
    assert 0 < entry["tokens"] < SHORT


@pytest.mark.parametrize("mode", ["amortize", "exact"])
def test_a_compaction_is_spliced_or_pays(begin: Begin, mode: str) -> None:
    """Summary and kept messages are in the cache: copied, or lost to the compaction."""
    session = begin(f"busts-compaction-{mode}")
    session.grow()
    before = chat(TURNS - 1, session.name)
    summary, _ = session.ask([*before, ASK], max_tokens=120, **NO_MARKS)
    said = {"role": "user", "content": f"What happened so far:\n{summary}\nGo on."}
    messages: Chat = [before[0], said, *before[-2:], NEXT]
    _, account = session.ask(messages, leyline={"compaction_edits": mode})
    lost = causes(account).get("compaction", 0)
    kept = 110 + session.length(messages[:4]) - session.length(messages[:2])
    if mode == "amortize":
        assert account["outcome"] == "spliced" and lost <= SHORT
        assert account["tokens"]["spliced"] + lost >= kept
    else:
        assert account["outcome"] == "reprefilled" and lost >= kept
    # The question that asked for the summary is gone.
    assert set(causes(account)) <= {"compaction", "undeclared"}
    assert causes(account).get("undeclared", 0) <= ENDS
    said = {"role": "assistant", "content": "Done."}
    _, account = session.ask([*messages, said, NEXT], leyline={"compaction_edits": mode})
    assert causes(account) == {}


def test_an_emptied_cache_is_the_engines_loss(begin: Begin) -> None:
    """Tokens ahead of an edit are lost to SGLang, which dropped them; others to it."""
    session = begin("busts-flushed")
    session.grow()
    before = chat(TURNS - 1, session.name)
    authorized = {"authorization": f"Bearer {API_KEY}"}
    assert httpx.post(f"{session.engine}/flush_cache", headers=authorized).status_code == 200
    _, account = session.ask(edited(TURNS, session.name), leyline=AMORTIZED)
    assert account["reason"] == "missing_source"
    whole = session.length(before)
    lost = causes(account)
    assert set(lost) == {"engine", "undeclared"}
    (edit,) = account["edits"]
    assert lost["engine"] == edit["span"][0]
    assert lost["undeclared"] == pytest.approx(whole - session.length(before[:4]), abs=ENDS)
    entry = next(each for each in account["busts"]["entries"] if each["cause"] == "undeclared")
    assert (entry["mode"], entry["why"]) == ("amortize", "missing_source")


@pytest.mark.nightly
def test_thinking_and_evictions_pay(tmp_path: Path) -> None:
    """On a small server of the model that thinks, what its template strips is copied, or lost to
    it; what other sessions drove out is lost to the engine."""
    if not PYTHON.is_file():
        pytest.skip("SGLang isn't installed here: make sglang-setup")
    folder = trained_model_dir(THINKING_MODEL_NAME)
    assert folder is not None
    flags = ("--radix-cache-backend", "leyline", f"--max-total-tokens={POOL}")
    named = ("--served-model-name", THINKING_MODEL_NAME, "--api-key", API_KEY)
    secret = {"LEYLINE_HINTS_SECRET": HINTS_SECRET}
    log = tmp_path / "log"
    with (
        SglangServer(folder, log, (*flags, *named), secret, python=str(PYTHON)) as server,
        Proxies() as proxies,
        httpx.Client(base_url=proxies.start(server.base_url), timeout=60) as http,
    ):
        for mode in ("amortize", "exact"):
            thinks(Session(http, server.base_url, f"thinks-{mode}", THINKING_MODEL_NAME), mode)
        for mode in ("none", "amortize"):
            evicted(Session(http, server.base_url, f"evicted-{mode}", THINKING_MODEL_NAME), mode)
        server.check_clean()


def thinks(session: Session, mode: str) -> None:
    """A loop of calls with thoughts, which the template strips when the user speaks again."""
    messages = chat(TURNS - 1, session.name)
    for at in range(2, len(messages), 2):
        messages[at]["content"] = f"<think>\n{words(f'{session.name} {at}', 3)}\n</think>\n\n"
    for end in range(2, len(messages) + 1, 2):
        _, account = session.ask(messages[:end], leyline={"reasoning_edits": mode})
        assert account["busts"]["lost_tokens"] == 0
    messages += [{"role": "assistant", "content": "Done."}, NEXT]
    _, account = session.ask(messages, leyline={"reasoning_edits": mode})
    kept, lost = (account["busts"]["thinking"][name] for name in ("kept", "lost"))
    stripped = session.length(messages) - session.length(messages[:2])
    assert set(causes(account)) <= {"template", "undeclared"}
    if mode == "amortize":
        assert account["outcome"] == "spliced" and lost == 0
        assert kept > 0.8 * stripped
    else:
        assert kept == 0 and lost > 0.8 * stripped
        assert lost <= causes(account)["template"]


def evicted(session: Session, mode: str) -> None:
    """A session that others drive out of the pool, and one that edits after that."""
    session.grow()
    before = session.length(chat(TURNS - 1, session.name))
    for other in range(4):
        flood = Session(session.http, session.engine, f"{session.name}-{other}", session.model)
        flood.ask(chat(11, flood.name))
    if mode == "none":
        _, account = session.ask(chat(TURNS, session.name))
        (entry,) = account["busts"]["entries"]
        assert (entry["cause"], entry["message"], entry["mode"]) == ("engine", None, None)
        assert entry["tokens"] + account["tokens"]["prefix"] == pytest.approx(before, abs=ENDS)
        return
    _, account = session.ask(edited(TURNS, session.name), leyline=AMORTIZED)
    assert (account["outcome"], account["reason"]) == ("reprefilled", "source_evicted")
    named = {each["cause"]: each["why"] for each in account["busts"]["entries"]}
    assert named == {"undeclared": "source_evicted", "engine": None}
