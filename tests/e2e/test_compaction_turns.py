"""Agents that compact their history, over HTTP: sessions continue, and summaries are spliced."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.bust_accounts import causes, check
from support.repair_talks import SUMMARY, SYSTEM, TOOLS, words

from leyline_lab.stand_ins.scripted_model import (
    SCRIPTED,
    Prompt,
    Reply,
    ScriptedModel,
    build_scripted,
    scripted_model,
)
from leyline_lab.stand_ins.serving import serving
from leyline_proxy.http.app import create_app
from leyline_proxy.settings import Settings

Chat = list[dict[str, Any]]

ASK = "Summarize the work so far."
PREAMBLE = "This session goes on from an earlier one. What happened:\n"
CLAUDE_CODE, CODEX, OPENCODE = "x-claude-code-session-id", "session_id", "x-opencode-session"


def script(prompt: Prompt) -> tuple[Reply, bool]:
    """Answers a request for a summary with it, and others with a text of their own."""
    asked = prompt.messages[-1][1]
    if ASK in asked or "ummar" in asked:
        return Reply(SUMMARY), True
    task = asked.splitlines()[0]
    return Reply(f"Done: {task}\n" + words(sum(map(ord, task)), 8)), True


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripted model."""
    return build_scripted(tmp_path_factory.mktemp("model"))


@contextmanager
def stack_of(files: Path, **settings: Any) -> Iterator[tuple[httpx.Client, ScriptedModel]]:
    """A client of a proxy in front of an engine that follows the script."""
    with scripted_model(files, script) as model, serving(model.app) as upstream:
        app = create_app(Settings(upstream=upstream, log_level="error", **settings))
        with serving(app) as origin, httpx.Client(base_url=origin, timeout=60) as http:
            yield http, model


@contextmanager
def client_of(files: Path, **settings: Any) -> Iterator[httpx.Client]:
    """The client alone."""
    with stack_of(files, **settings) as (http, _):
        yield http


@pytest.fixture(scope="module")
def client(files: Path) -> Iterator[httpx.Client]:
    """A client of a proxy with default settings."""
    with client_of(files) as http:
        yield http


def ask(
    client: httpx.Client, chat: Chat, headers: dict[str, str], **more: Any
) -> tuple[str, dict[str, Any]]:
    """An answer's text, and its account."""
    body = {"model": SCRIPTED, "messages": chat, "temperature": 0, "max_tokens": 400} | more
    answer = client.post("/v1/chat/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    document = answer.json()
    return document["choices"][0]["message"]["content"], document["leyline"]


def worked(client: httpx.Client, headers: dict[str, str], seed: int) -> tuple[Chat, str]:
    """A conversation of four rounds, and the id of its session."""
    chat: Chat = [SYSTEM]
    session = ""
    for number in range(4):
        text = f"Task {seed}.{number}\n{words(seed * 10 + number, 12)}"
        chat.append({"role": "user", "content": text})
        said, account = ask(client, chat, headers, tools=TOOLS)
        chat.append({"role": "assistant", "content": said})
        session = account["session"]
    return chat, session


def compacted(harness: str, chat: Chat, summary: str) -> Chat:
    """The list with which a harness begins again."""
    new = {"role": "user", "content": "Go on with the last task."}
    if harness == CODEX:
        users = [message for message in chat if message["role"] == "user"]
        return [chat[0], *users, {"role": "user", "content": PREAMBLE + summary}, new]
    if harness == OPENCODE:
        asked = {"role": "user", "content": "What did we do so far?"}
        return [chat[0], asked, {"role": "assistant", "content": summary}, new]
    return [chat[0], {"role": "user", "content": f"{PREAMBLE}{summary}\nGo on."}, *chat[-2:], new]


@pytest.mark.parametrize(
    "harness",
    [
        CLAUDE_CODE,
        *(
            pytest.param(name, marks=pytest.mark.nightly)
            for name in (CODEX, OPENCODE, "x-leyline-session")
        ),
    ],
)
def test_a_compacted_session_goes_on(client: httpx.Client, harness: str) -> None:
    """It keeps its id, only what is new is prefilled, and the account says why."""
    headers = {harness: f"work-{harness}"}
    chat, session = worked(client, headers, 10 + len(harness))
    # A harness asks for the summary without its tools.
    summary, account = ask(client, [*chat, {"role": "user", "content": ASK}], headers)
    assert (summary, account["session"]) == (SUMMARY, session)
    messages = compacted(harness, chat, summary)
    _, account = ask(client, messages, headers, tools=TOOLS)
    assert (account["session"], account["outcome"]) == (session, "spliced"), account["edits"]
    edits = {(edit["cause"], edit["mode"]) for edit in account["edits"]}
    assert ("compaction", "amortize") in edits
    tokens = account["tokens"]
    # New are the preamble, the question around the summary, and the next task.
    new = sum(len(text) for text in (PREAMBLE, "Go on.", "What did we do so far?")) + 40
    assert tokens["prefilled"] <= new + 0.05 * tokens["prompt"], tokens
    check(account)
    lost = causes(account)
    assert set(lost) <= {"compaction", "undeclared"}, account["busts"]
    # The tokens that the template writes after a message stand for what the list no longer has.
    assert sum(lost.values()) <= 32, account["busts"]
    said, _ = ask(client, messages, headers, tools=TOOLS)
    _, after = ask(
        client,
        [*messages, {"role": "assistant", "content": said}, {"role": "user", "content": "More."}],
        headers,
        tools=TOOLS,
    )
    assert after["session"] == session
    assert after["tokens"]["prefilled"] < 64, after["tokens"]


def test_a_compacted_history_gives_its_slots_back(files: Path) -> None:
    """KV of old turns alone leaves the engine's cache at once; other sessions keep theirs."""
    with stack_of(files) as (client, model):

        def cached() -> int:
            return int(model.app.state.service._engine.stats().cached)

        headers = {CLAUDE_CODE: "shrinks"}
        chat, session = worked(client, headers, 6)
        other, account = ask(client, chat[:4], {CLAUDE_CODE: "another"}, tools=TOOLS)
        summary, _ = ask(client, [*chat, {"role": "user", "content": ASK}], headers, tools=TOOLS)
        before = cached()
        messages = compacted(CLAUDE_CODE, chat, summary)
        said, account = ask(client, messages, headers, tools=TOOLS)
        assert (account["outcome"], account["session"]) == ("spliced", session)
        document = client.get(f"/v1/leyline/sessions/{session}").json()
        assert len(document["retained"]) == 1, "turns are sources that the engine doesn't hold"
        after, (theirs, _, mine) = cached(), model.turns()[-3:]
        lengths = [len(turn.prompt) + len(turn.kept) for turn in (mine, theirs)]
        assert after < before
        assert after <= sum(lengths) - account["tokens"]["prefix"], "old turns are still cached"
        # The other session continues from its cache, and so does this one.
        chat_of_other = [*chat[:4], {"role": "assistant", "content": other}]
        chat_of_other.append({"role": "user", "content": "And now?"})
        _, account = ask(client, chat_of_other, {CLAUDE_CODE: "another"}, tools=TOOLS)
        assert account["tokens"]["prefilled"] < 40, account["tokens"]
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "More."}]
        _, account = ask(client, messages, headers, tools=TOOLS)
        assert account["tokens"]["prefilled"] < 40, account["tokens"]


OTHER = {"role": "system", "content": "You review programs.\n" + words(3, 20)}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("before", "after", "same"),
    [([SYSTEM], [SYSTEM], True), ([SYSTEM], [OTHER], False), ([], [], False)],
)
def test_instructions_within_the_conversation_may_change(
    client: httpx.Client, before: Chat, after: Chat, same: bool
) -> None:
    """Claude Code writes some after the first message, and again in another order when it compacts;
    those at the beginning show the session."""
    headers = {CLAUDE_CODE: f"reordered {len(before)} {same}"}
    parts = [words(60 + part, 30) for part in range(2)]
    task = {"role": "user", "content": f"Task {same}\n{words(70, 12)}"}
    chat: Chat = [*before, task, {"role": "system", "content": "\n".join(parts)}]
    said, account = ask(client, chat, headers, tools=TOOLS)
    session = account["session"]
    chat += [{"role": "assistant", "content": said}, {"role": "user", "content": ASK}]
    summary, account = ask(client, chat, headers, tools=TOOLS)
    assert account["session"] == session
    again = {"role": "system", "content": "\n".join(reversed(parts))}
    messages: Chat = [*after, {"role": "user", "content": f"{PREAMBLE}{summary}\nGo on."}, again]
    _, account = ask(client, messages, headers, tools=TOOLS)
    spliced = (account["session"] == session, account["outcome"] == "spliced")
    assert spliced == (same, same), account
    if same:
        # One of the two parts stands before the other now, and is computed again: a token has
        # about two characters.
        new = len(PREAMBLE) + len("Go on.") + 40 + 0.6 * len(parts[0])
        assert account["tokens"]["prefilled"] <= new, account["tokens"]


@pytest.mark.nightly
def test_a_title_is_another_conversation(client: httpx.Client) -> None:
    """A request that quotes an answer under other instructions doesn't join the session."""
    headers = {CLAUDE_CODE: "titled"}
    chat, session = worked(client, headers, 2)
    said = chat[-1]["content"]
    title: Chat = [
        {"role": "system", "content": "Write a title of three words."},
        {"role": "user", "content": f"The conversation:\n{said}"},
    ]
    _, account = ask(client, title, headers)
    assert account["session"] != session
    assert account["outcome"] != "spliced"


@pytest.mark.nightly
def test_a_summary_by_somebody_else_opens_a_session(client: httpx.Client) -> None:
    """Likeness isn't enough: a summary that the session's model didn't write continues nothing."""
    headers = {CLAUDE_CODE: "other words"}
    chat, session = worked(client, headers, 3)
    messages: Chat = [chat[0], {"role": "user", "content": PREAMBLE + words(77, 12)}]
    _, account = ask(client, messages, headers, tools=TOOLS)
    assert account["session"] != session


@pytest.mark.nightly
def test_a_passage_opens_a_session(client: httpx.Client) -> None:
    """Whoever quotes a sentence of a long answer doesn't continue the session it is from."""
    headers = {CLAUDE_CODE: "a passage"}
    chat, session = worked(client, headers, 7)
    summary, _ = ask(client, [*chat, {"role": "user", "content": ASK}], headers, tools=TOOLS)
    passage = summary.split("\n")[3]
    messages: Chat = [chat[0], {"role": "user", "content": f"What is this?\n{passage}"}]
    _, account = ask(client, messages, headers, tools=TOOLS)
    assert account["session"] != session


@pytest.mark.nightly
def test_a_tenant_may_want_it_exact(files: Path) -> None:
    """The session continues all the same, and its summary is prefilled."""
    headers = {CLAUDE_CODE: "exact"}
    with client_of(files, compaction_edits="exact") as client:
        chat, session = worked(client, headers, 4)
        summary, _ = ask(client, [*chat, {"role": "user", "content": ASK}], headers, tools=TOOLS)
        messages = compacted(CLAUDE_CODE, chat, summary)
        _, account = ask(client, messages, headers, tools=TOOLS)
        assert (account["session"], account["outcome"]) == (session, "reprefilled")
        assert ("compaction", "exact") in {(e["cause"], e["mode"]) for e in account["edits"]}
        check(account)
        # A token has about two characters: the summary and the kept round are lost to nothing else.
        kept = sum(len(message["content"]) for message in chat[-2:]) + len(summary)
        assert causes(account)["compaction"] > 0.4 * kept
        entry = account["busts"]["entries"][0]
        assert (entry["cause"], entry["mode"], entry["why"]) == ("compaction", "exact", "exact")
        assert entry["messages"][0] == 1, "the summary is in the user's message"
        more = {"leyline": {"compaction_edits": "amortize"}}
        _, account = ask(client, [*messages, *messages[-1:]], headers, tools=TOOLS, **more)
        assert account["session"] == session


def test_a_forgotten_history_is_in_no_summary(client: httpx.Client) -> None:
    """A summary that read what is forgotten is prefilled, not spliced."""
    headers = {"x-leyline-session": "forgets"}
    chat, _ = worked(client, headers, 5)
    summary, _ = ask(client, [*chat, {"role": "user", "content": ASK}], headers)
    marked = [dict(message) for message in chat]
    marked[1] |= {"content": "[removed]", "leyline": {"forget": True}}
    _, account = ask(client, [*marked, {"role": "user", "content": "On."}], headers, tools=TOOLS)
    assert account["forgot"]["result"] == "erased", account
    _, account = ask(client, compacted(CLAUDE_CODE, chat, summary), headers, tools=TOOLS)
    quoted = len(SUMMARY)
    assert account["tokens"]["prefilled"] >= quoted, account["tokens"]


def test_a_compaction_by_the_proxy_is_spliced(client: httpx.Client) -> None:
    """With `leyline.compact`, too, the summary comes from the KV under which it was written."""
    headers = {"x-leyline-session": "by the proxy"}
    chat, session = worked(client, headers, 9)
    chat.append({"role": "user", "content": "And the next one?"})
    wish = {"leyline": {"compact": {"threshold_tokens": 1000}}}
    _, account = ask(client, chat, headers, tools=TOOLS, **wish)
    assert account["compaction"]["compacted"], account["compaction"]
    assert (account["session"], account["outcome"]) == (session, "spliced"), account["edits"]
    assert ("compaction", "amortize") in {(e["cause"], e["mode"]) for e in account["edits"]}
    assert account["tokens"]["prefilled"] < 0.1 * account["tokens"]["prompt"], account["tokens"]
