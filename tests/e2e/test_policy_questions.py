"""A policy's question about the conversation shares the session's KV both ways, over HTTP."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from compaction_kit import prompts
from support.repair_talks import SUMMARY, SYSTEM, TOOLS, words

from leyline_lab.stand_ins.scripted_model import (
    SCRIPTED,
    Prompt,
    Reply,
    ScriptedModel,
    build_scripted,
    scripted_model,
)
from leyline_lab.stand_ins.serving import engine_tokenizer, serving
from leyline_policies.builtin.summarize import HEADING, TASK
from leyline_proxy.http.app import create_app
from leyline_proxy.settings import Settings

Chat = list[dict[str, Any]]

ALTERNATES = """\
{%- for message in messages -%}
    {%- if loop.index0 and message.role == 'user' and loop.previtem.role == 'user' -%}
        {{- raise_exception('roles must alternate') -}}
    {%- endif -%}
{%- endfor -%}
"""
POLICY = "summarize:trigger_tokens=1200,keep_messages=4,summary_tokens=400"


def is_question(prompt: Prompt) -> bool:
    """The last message is the policy's."""
    return prompt.messages[-1][1].endswith(TASK)


def script(prompt: Prompt) -> tuple[Reply, bool]:
    """Answers the policy with the summary, and others with a text of their own."""
    if is_question(prompt):
        return Reply(SUMMARY), True
    task = prompt.messages[-1][1].splitlines()[0]
    return Reply(f"Done: {task}\n" + words(sum(map(ord, task)), 3)), True


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripted model."""
    return build_scripted(tmp_path_factory.mktemp("model"))


class Talk:
    """A session of an agent."""

    def __init__(self, http: httpx.Client, headers: dict[str, str]) -> None:
        self._http = http
        self._headers = headers
        self.chat: Chat = [SYSTEM]

    def ask(self, text: str, **more: Any) -> dict[str, Any]:
        """One turn; its account."""
        self.chat.append({"role": "user", "content": text})
        body = {
            "model": SCRIPTED,
            "messages": self.chat,
            "tools": TOOLS,
            "temperature": 0,
            "max_tokens": 400,
        }
        answer = self._http.post("/v1/chat/completions", json=body | more, headers=self._headers)
        assert answer.status_code == 200, answer.text
        document = answer.json()
        self.chat.append(document["choices"][0]["message"])
        account: dict[str, Any] = document["leyline"]
        return account

    def work(self, seed: int, rounds: int = 4) -> dict[str, Any]:
        """Some turns; the account of the last."""
        for number in range(rounds):
            account = self.ask(f"Task {seed}.{number}\n{words(seed * 10 + number, 12)}")
        return account

    def session(self, name: str) -> dict[str, Any]:
        """The session's document."""
        document: dict[str, Any] = self._http.get(f"/v1/leyline/sessions/{name}").json()
        return document


@contextmanager
def stack_of(files: Path, **settings: Any) -> Iterator[tuple[httpx.Client, ScriptedModel]]:
    """A client of a proxy with the policy, in front of an engine that follows the script."""
    given = {"policy": POLICY, "edit_timing": "now", "log_level": "error"} | settings
    with scripted_model(files, script) as model, serving(model.app) as upstream:
        app = create_app(Settings(upstream=upstream, **given))
        with serving(app) as origin, httpx.Client(base_url=origin, timeout=60) as http:
            yield http, model


@pytest.fixture(scope="module")
def stack(files: Path) -> Iterator[tuple[httpx.Client, ScriptedModel]]:
    """The stack with default settings."""
    with stack_of(files) as found:
        yield found


def written(http: httpx.Client, count: int) -> None:
    """Wait for so many answers to the policy."""
    line = f'leyline_policy_completions_total{{result="written"}} {count}.0'
    deadline = time.monotonic() + 20
    while line not in http.get("/metrics").text:
        assert time.monotonic() < deadline, line
        time.sleep(0.02)


TURNS = "leyline_turns_total"


def counts(http: httpx.Client) -> dict[str, float]:
    """The counters of the proxy, by name and labels."""
    lines = http.get("/metrics").text.splitlines()
    pairs = (line.rpartition(" ") for line in lines if line and not line.startswith("#"))
    return {name: float(value) for name, _, value in pairs}


def prefilled(account: dict[str, Any]) -> int:
    """Tokens that a turn computed."""
    return int(account["tokens"]["prefilled"])


def held(model: ScriptedModel) -> list[str]:
    """The texts of the turns that the engine retains."""
    sessions = model.app.state.service._engine.cache.registry._sessions.values()
    decode = engine_tokenizer(model.app).decode
    return [decode(turn.tokens.tolist()) for turns in sessions for turn in turns.values()]


TASK_TOKENS = 120
SUMMARY_TOKENS = 350
"""A bound above the question's length, and one below the summary's."""


def summed(http: httpx.Client, name: str, count: int, seed: int) -> Talk:
    """A session whose summary has been written and not used."""
    talk = Talk(http, {"x-leyline-session": name})
    talk.work(seed, 3)
    written(http, count)
    return talk


def test_a_summary_shares_the_sessions_cache_both_ways(files: Path) -> None:
    """Its question prefills nothing but itself, and the first turn with it nothing but what is
    new."""
    with stack_of(files) as (http, model):
        talk = summed(http, "both", 1, 5)
        question = talk.session("both")["history"][-1]
        assert question["receipt"]["tokens"]["prefix"] > 2000
        assert question["receipt"]["tokens"]["prefilled"] <= TASK_TOKENS
        counted = counts(http)
        for source, kind in (("cached", "prefix"), ("prefilled", "prefilled")):
            tokens = question["receipt"]["tokens"][kind]
            assert counted[f'leyline_policy_completion_tokens_total{{source="{source}"}}'] == tokens
        # No caller sent it: its turns are those of the three requests.
        assert sum(n for name, n in counted.items() if name.startswith(TURNS)) == 3
        account = talk.ask("Go on.")
        assert HEADING + SUMMARY in prompts(model)[-1].messages[1][1]
        assert (account["outcome"], account["reason"]) == ("spliced", "spliced")
        causes = {(edit["cause"], edit["mode"]) for edit in account["edits"]}
        assert causes == {("policy:summarize", "amortize")}
        # New are the next task and the heading; a token has about two characters.
        new = (len("Go on.") + len(HEADING)) // 2 + 10
        assert prefilled(account) <= new + 0.05 * account["tokens"]["prompt"], account["tokens"]
        assert prefilled(talk.ask("And on.")) <= 30


@pytest.mark.nightly
def test_a_session_without_a_name_shares_them_as_well(files: Path) -> None:
    """The policy's edit alone shortens its list, so nothing is remembered that it doesn't show."""
    with stack_of(files) as (http, _):
        talk = Talk(http, {})
        session = talk.work(6, 3)["session"]
        written(http, 1)
        account = talk.ask("Go on.")
        assert (account["session"], account["outcome"]) == (session, "spliced")
        assert prefilled(account) <= 0.05 * account["tokens"]["prompt"], account["tokens"]
        assert talk.ask("And on.")["session"] == session


def test_what_the_caller_removed_is_in_no_spliced_summary(files: Path) -> None:
    """The summary has read the kept messages, too: without one of them it is prefilled."""
    with stack_of(files) as (http, _):
        talk = summed(http, "removed", 1, 7)
        talk.chat[-2] |= {"content": "Task 7.2\n" + words(700, 12)}
        account = talk.ask("Go on.")
        causes = {(edit["cause"], edit["mode"]) for edit in account["edits"]}
        assert ("undeclared", "exact") in causes
        assert prefilled(account) >= SUMMARY_TOKENS + 300, account["tokens"]


def test_a_forgotten_message_reaches_the_summary_that_read_it(files: Path) -> None:
    """The summary goes with it, KV and text: the model has read the message as it wrote it."""
    with stack_of(files) as (http, model):
        talk = summed(http, "forgets", 1, 8)
        secret = talk.chat[-2]["content"].splitlines()[3]
        assert sum(secret in text for text in held(model)) == 2
        talk.chat[-2] |= {"content": "[removed]", "leyline": {"forget": True}}
        account = talk.ask("Go on.")
        assert account["forgot"]["result"] == "erased", account
        derived = {(each["role"], each["read"]) for each in account["derived"]}
        assert ("policy", "direct") in derived and account["derived_complete"]
        assert not any(SUMMARY in text for _, text in prompts(model)[-1].messages)
        assert account["turn"] == talk.session("forgets")["retained"][-1]
        assert len(talk.session("forgets")["retained"]) == 1
        assert held(model) and not any(secret in text for text in held(model))


def test_a_summary_of_what_is_forgotten_is_gone(files: Path) -> None:
    """It isn't sent any more, and the next one is written without the text."""
    with stack_of(files) as (http, model):
        talk = summed(http, "gone", 1, 9)
        secret = talk.chat[1]["content"].splitlines()[3]
        talk.chat[1] |= {"content": "[removed]", "leyline": {"forget": True}}
        account = talk.ask("Go on.")
        assert account["forgot"]["result"] == "erased", account
        assert not any(SUMMARY in text for _, text in prompts(model)[-1].messages)
        written(http, 2)
        assert is_question(prompts(model)[-1])
        assert not any(secret in text for _, text in prompts(model)[-1].messages)
        account = talk.ask("And on.")
        assert prefilled(account) <= 0.05 * account["tokens"]["prompt"] + 20, account["tokens"]


@pytest.mark.nightly
def test_a_question_takes_no_turns_place(files: Path) -> None:
    """The turn before it stays a source, so that all that is kept is spliced from it."""
    with stack_of(files, retained_turns=1) as (http, _):
        talk = summed(http, "one", 1, 11)
        history = [turn["turn"] for turn in talk.session("one")["history"]]
        assert talk.session("one")["retained"] == history[-2:]
        account = talk.ask("Go on.")
        assert account["outcome"] == "spliced"
        assert prefilled(account) <= 0.05 * account["tokens"]["prompt"], account["tokens"]
        # It stays one turn longer than the turns before it.
        assert talk.session("one")["retained"] == [history[-1], account["turn"]]
        account = talk.ask("And on.")
        assert talk.session("one")["retained"] == [account["turn"]]


@pytest.mark.nightly
def test_a_template_may_refuse_a_second_message_of_the_user(tmp_path: Path) -> None:
    """The question then follows in the last message, and shares the cache all the same."""
    files = build_scripted(tmp_path)
    template = files / "chat_template.jinja"
    template.write_text(ALTERNATES + template.read_text())
    with stack_of(files) as (http, model):
        talk = summed(http, "strict", 1, 12)
        asked = prompts(model)[-1].messages
        assert [role for role, _ in asked][-2:] == ["assistant", "user"]
        assert asked[-1][1].startswith("Task 12.2") and asked[-1][1].endswith(TASK)
        question = talk.session("strict")["history"][-1]["receipt"]["tokens"]
        assert question["prefilled"] <= TASK_TOKENS, question
        account = talk.ask("Go on.")
        assert account["outcome"] == "spliced"
        assert prefilled(account) <= 0.05 * account["tokens"]["prompt"], account["tokens"]


@pytest.mark.nightly
def test_a_summary_is_no_longer_than_the_window_has_room_for(files: Path) -> None:
    """A policy may ask for more tokens than that, and still gets its answer."""
    policy = POLICY.replace("summary_tokens=400", "summary_tokens=1000000")
    with stack_of(files, policy=policy) as (http, _):
        talk = summed(http, "long", 1, 13)
        assert talk.ask("Go on.")["outcome"] == "spliced"
