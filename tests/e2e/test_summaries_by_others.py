"""A harness that asks for a title first and has another agent write its summary, over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.bust_accounts import check
from support.repair_talks import SUMMARY, TOOLS, words

from leyline_lab.stand_ins.scripted_model import (
    SCRIPTED,
    Prompt,
    Reply,
    build_scripted,
    scripted_model,
)
from leyline_lab.stand_ins.serving import serving
from leyline_proxy.http.app import create_app
from leyline_proxy.settings import Settings

Chat = list[dict[str, Any]]

HEADER = "x-session-id"
SESSIONS = "/v1/leyline/sessions"
SUMMARISER = {"role": "system", "content": "You summarise conversations for other agents."}
SECOND = "The agent also did this:\n" + words(3, 12)
"""The summary of a list that begins with one."""
TITLER = {"role": "system", "content": "You give titles to conversations."}
SENT_OUT = {"role": "system", "content": "You search programs.\n" + words(5, 4)}
GO_ON = {"role": "user", "content": "Continue if you have next steps."}


def script(prompt: Prompt) -> tuple[Reply, bool]:
    """Answers a request for a summary with it, and others with a text of their own."""
    asked = prompt.messages[-1][1]
    if "anchored summary" in asked:
        return Reply(SECOND if SUMMARY in asked else SUMMARY), True
    if "title" in asked:
        return Reply("Programs"), True
    task = asked.splitlines()[0]
    return Reply(f"Done: {task}\n" + words(sum(map(ord, task)), 5)), True


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripted model."""
    return build_scripted(tmp_path_factory.mktemp("model"))


@contextmanager
def client_of(files: Path, **settings: Any) -> Iterator[httpx.Client]:
    """A client of a proxy in front of an engine that follows the script."""
    with scripted_model(files, script) as model, serving(model.app) as upstream:
        app = create_app(Settings(upstream=upstream, log_level="error", **settings))
        with serving(app) as origin, httpx.Client(base_url=origin, timeout=60) as http:
            yield http


@pytest.fixture(scope="module")
def client(files: Path) -> Iterator[httpx.Client]:
    """A client of a proxy for two tenants, with default settings else."""
    with client_of(files, api_keys=["red:kr", "blue:kb"]) as http:
        yield http


class Window:
    """A conversation of the harness, as opencode plays it.

    Args:
        name: the harness's name for its session.
        seed: windows of different seeds have no text in common.
        key: its tenant's; empty in front of a proxy without tenants.
    """

    def __init__(self, http: httpx.Client, name: str, seed: int, key: str = "kr") -> None:
        self.http = http
        self.headers = {"authorization": f"Bearer {key}"} if key else {}
        if name:
            self.headers[HEADER] = name
        self.seed = seed
        # No window finds another's prompt in the cache.
        self.system = {"role": "system", "content": f"You repair programs.\n{words(seed, 6)}"}
        self.chat: Chat = [self.system]
        self.compactions = 0

    def ask(self, chat: Chat, **more: Any) -> tuple[str, dict[str, Any]]:
        """An answer's text, and its account."""
        body = {"model": SCRIPTED, "messages": chat, "temperature": 0, "max_tokens": 400} | more
        answer = self.http.post("/v1/chat/completions", json=body, headers=self.headers)
        assert answer.status_code == 200, answer.text
        document = answer.json()
        check(document["leyline"])
        return document["choices"][0]["message"]["content"], document["leyline"]

    def task(self, number: int) -> dict[str, Any]:
        """A message of the user's."""
        text = f"Task {self.seed}.{number}\n{words(self.seed * 100 + number, 5)}"
        return {"role": "user", "content": text}

    def title(self, *told: str) -> dict[str, Any]:
        """The account of a request for a title."""
        asks = {"role": "user", "content": "Generate a title for this conversation:"}
        texts = told or (self.task(0)["content"],)
        return self.ask([TITLER, asks, *({"role": "user", "content": text} for text in texts)])[1]

    def work(self, rounds: int, first: int = 0) -> list[dict[str, Any]]:
        """The accounts of some rounds."""
        accounts = []
        for number in range(first, first + rounds):
            self.chat.append(self.task(number))
            said, account = self.ask(self.chat, tools=TOOLS)
            self.chat.append({"role": "assistant", "content": said})
            accounts.append(account)
        return accounts

    def transcript(self) -> Chat:
        """The list for the agent that summarises."""
        told = "\n\n".join(
            f"[{message['role'].title()}]: {message['content']}" for message in self.chat[1:]
        )
        asks = f"<conversation>\n{told}\n</conversation>\n\nCreate a new anchored summary."
        return [SUMMARISER, {"role": "user", "content": asks}]

    def summarise(self) -> dict[str, Any]:
        """The account of the request for a summary; the list is compacted."""
        summary, account = self.ask(self.transcript())
        assert summary == (SECOND if self.compactions else SUMMARY)
        self.compact(summary)
        return account

    def compact(self, summary: str = SUMMARY) -> None:
        """Begin the list again with the summary."""
        self.compactions += 1
        text = f"What did we do so far, of {self.seed}.{self.compactions}?"
        asked = {"role": "user", "content": text}
        self.chat = [self.system, asked, {"role": "assistant", "content": summary}, GO_ON]

    def go_on(self, **more: Any) -> dict[str, Any]:
        """The account of the first turn after a compaction."""
        return self.ask(self.chat, tools=TOOLS, **{"max_tokens": 8, **more})[1]


NEW = len("What did we do so far, of 20.1?") + len(GO_ON["content"]) + 40
"""Most tokens that such a turn has besides the summary: each has a character or more."""


def is_spliced(account: dict[str, Any]) -> bool:
    """True if all but what is new came from the cache."""
    tokens = account["tokens"]
    near = tokens["prefilled"] <= NEW + 0.05 * tokens["prompt"]
    causes = {(edit["cause"], edit["mode"]) for edit in account["edits"]}
    return account["outcome"] == "spliced" and near and causes == {("compaction", "amortize")}


def is_prefilled(account: dict[str, Any]) -> bool:
    """True if the summary didn't come from the cache."""
    tokens = account["tokens"]
    return tokens["spliced"] == 0 and tokens["prefilled"] >= 0.3 * len(SUMMARY)


@pytest.mark.parametrize(
    "titles",
    [
        "first",
        "in the middle",
        pytest.param("none", marks=pytest.mark.nightly),
        pytest.param("of all", marks=pytest.mark.nightly),
    ],
)
def test_the_first_turn_after_a_compaction_prefills_what_is_new(
    client: httpx.Client, titles: str
) -> None:
    """It does whatever was asked beside the work, and the session is one."""
    window = Window(client, f"titles {titles}", 20 + len(titles))
    beside = [window.title()] if titles == "first" else []
    accounts = window.work(2)
    if titles == "in the middle":
        beside.append(window.title(window.chat[-1]["content"]))
    elif titles == "of all":
        beside.append(window.title(*(message["content"] for message in window.chat[1:])))
    accounts += window.work(1, first=2)
    sessions = {account["session"] for account in accounts}
    assert not any(account["edits"] for account in (*accounts, *beside))
    assert all(account["tokens"]["prefilled"] < 400 for account in accounts[1:])
    account = window.summarise()
    assert not account["edits"] and account["tokens"]["spliced"] == 0
    sessions.add(account["session"])
    account = window.go_on()
    assert is_spliced(account), account
    sessions.add(account["session"])
    after = window.work(1, first=10)
    assert all(account["tokens"]["prefilled"] < 500 for account in after)
    sessions |= {account["session"] for account in after}
    assert len(sessions) == 1
    if titles in ("first", "of all"):
        assert {account["session"] for account in beside} == sessions
    for account in beside:
        assert account["tokens"]["spliced"] == 0


def test_a_second_compaction_is_spliced_as_well(client: httpx.Client) -> None:
    """Its transcript begins with the first summary, and its own is another."""
    window = Window(client, "twice", 61)
    window.title()
    accounts = [*window.work(2), window.summarise()]
    first = window.go_on()
    accounts += [first, *window.work(1, first=10), window.summarise()]
    second = window.go_on()
    assert is_spliced(first) and is_spliced(second), (first, second)
    assert SUMMARY not in str(window.chat) and SECOND in window.chat[2]["content"]
    assert len({account["session"] for account in (*accounts, second)}) == 1


def test_two_windows_and_who_they_send_out_stay_apart(client: httpx.Client) -> None:
    """Of one name, only the first agent's conversation is certain: another prefills its summary."""
    one, two = Window(client, "windows", 41), Window(client, "windows", 42)
    one.title()
    first, second = one.work(2), two.work(2)
    task = {"role": "user", "content": f"Search.\n{one.chat[1]['content']}"}
    _, sent_out = one.ask([SENT_OUT, task], tools=TOOLS, max_tokens=8)
    first += one.work(1, first=2)
    second += two.work(1, first=2)
    mine = {account["session"] for account in first}
    theirs = {account["session"] for account in second}
    assert len(mine) == len(theirs) == 1
    assert len({*mine, *theirs, sent_out["session"]}) == 3
    assert not any(account["edits"] for account in (*first, *second, sent_out))
    assert two.summarise()["session"] not in mine
    account = two.go_on()
    assert is_prefilled(account) and account["session"] not in mine, account
    assert one.summarise()["session"] in mine
    assert is_spliced(one.go_on())


def test_another_name_or_tenant_gets_no_summary(client: httpx.Client) -> None:
    """The same words under another name, or none, or another tenant's, are prefilled."""
    window = Window(client, "ours", 43)
    theirs = Window(client, "ours", 43, key="kb")
    for each in (window, theirs):
        each.title()
    window.work(2)
    # A transcript of another's work is a conversation of its own.
    assert theirs.ask(window.transcript())[1]["session"] != "ours"
    window.summarise()
    strangers = [Window(client, name, 43) for name in ("theirs", "")]
    for number, stranger in enumerate((*strangers, theirs)):
        stranger.chat = [dict(message) for message in window.chat]
        stranger.chat[1]["content"] += f" Of {number}?"
        account = stranger.go_on()
        assert is_prefilled(account), account
    assert is_spliced(window.go_on())
    listed = [
        {
            line["id"]: line["turns"]
            for line in client.get(SESSIONS, headers=each.headers).json()["sessions"]
        }
        for each in (window, theirs)
    ]
    assert listed[0]["ours"] == 5 and listed[0]["theirs"] == 1
    assert listed[1].pop("ours") == 2 and list(listed[1].values()) == [1]


@pytest.mark.nightly
def test_a_conversation_without_a_name_prefills_its_summary(client: httpx.Client) -> None:
    """Nothing shows that the summary is of its history."""
    window = Window(client, "", 44)
    window.title()
    window.work(2)
    window.summarise()
    account = window.go_on()
    assert is_prefilled(account), account


@pytest.mark.nightly
def test_exact_compactions_prefill_it(files: Path) -> None:
    """A proxy may want it so, and so may a request."""
    with client_of(files, compaction_edits="exact") as http:
        window = Window(http, "exact", 45, key="")
        window.title()
        window.work(2)
        window.summarise()
        account = window.go_on()
        assert is_prefilled(account), account
        assert ("compaction", "exact") in {(e["cause"], e["mode"]) for e in account["edits"]}


@pytest.mark.parametrize("when", ["after", pytest.param("before", marks=pytest.mark.nightly)])
def test_a_forget_keeps_a_summary_out(client: httpx.Client, when: str) -> None:
    """A transcript's texts have names of their own, so the whole summary counts as a reader of what
    is forgotten."""
    window = Window(client, f"forgets {when}", 46 + len(when))
    window.work(2)
    transcript = window.transcript()
    if when == "after":
        window.ask(transcript)
    marked = [dict(message) for message in window.chat]
    marked[1] |= {"content": "[removed]", "leyline": {"forget": True}}
    _, account = window.ask([*marked, {"role": "user", "content": "On."}], tools=TOOLS)
    assert account["forgot"]["result"] == "erased", account
    if when == "before":
        window.ask(transcript)
    window.compact()
    account = window.go_on()
    assert is_prefilled(account), account


@pytest.mark.nightly
def test_a_forget_after_the_splice_erases_the_summary(client: httpx.Client) -> None:
    """A forget of anything then is one of all that the session has in the cache."""
    window = Window(client, "forgets later", 60)
    window.work(2)
    window.summarise()
    assert is_spliced(window.go_on())
    marked = [dict(message) for message in window.chat]
    marked[1] |= {"content": "[removed]", "leyline": {"forget": True}}
    _, account = window.ask(marked, tools=TOOLS)
    assert account["forgot"]["result"] == "erased", account
    assert is_prefilled(account), account["tokens"]
