"""The clients: how each is started, and what the model says to it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..harness.machine import CHECKOUT
from ..stand_ins.scripted_model import SCRIPTED, Call, Reply, follow, follow_marks
from .stack import KEY, Place, Ran, Stack, client_stack, run_client
from .verdict import LAST, MEASURE, NOTES, SHOW, TEXT, Verdict, judge

TASK = "Write notes.txt, then measure it into size.txt, then show both."
PROGRAMS = CHECKOUT / "tests" / "clients" / "programs"
INSTALLED = CHECKOUT / ".clients"
"""The folder where deploy/clients.sh puts packages that aren't among the tests' own."""

PRICES: Mapping[str, Any] = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
"""Keeps LiteLLM from fetching its list of prices."""

Files = Mapping[str, str]
Replies = Callable[[Path], tuple[Reply, ...]]
"""The model's replies, given the client's working folder."""


def no_files(_: Place) -> Files:
    """Nothing has to be in the home."""
    return {}


@dataclass(frozen=True, slots=True)
class Client:
    """A client as it comes, and a session for it."""

    name: str
    """Of the session."""
    package: str
    """In its registry."""
    api: str
    """``chat``, ``responses`` or ``messages``."""
    executable: Path
    arguments: Callable[[Place], list[str]]
    environment: Callable[[Place], dict[str, str]]
    replies: Replies
    files: Callable[[Place], Files] = no_files
    """The files that must be in the home before it starts, by path below it."""
    venv: str = ""
    """Folder below ``.clients``; empty for the tests' own packages."""
    nightly: bool = True
    appends: bool = True
    """True if it leaves its history as it is from turn to turn."""
    websocket: bool = False
    """True if its turns must all come over WebSocket."""
    mark: str = ""
    """Occurs once per step in the user message of a client that sends no other messages."""
    asks: frozenset[str] = frozenset()
    """Hosts that it asks whatever it is told; it gets no answer."""
    timeout_s: float = 240.0

    @property
    def speaks_to_engines(self) -> bool:
        """Return True if the engine could serve it without the proxy."""
        return self.api == "chat"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a client's session, and its output."""

    verdict: Verdict
    ran: Ran


def play(client: Client, files: Path, folder: Path, *, proxied: bool = True) -> Outcome:
    """Run a client's session.

    Args:
        files: of the scripted model.
        folder: emptied; takes the client's working folder and its home.
        proxied: False for the engine alone.
    """
    replies = client.replies(folder / "work")
    script = follow_marks(TASK, client.mark, *replies) if client.mark else follow(TASK, *replies)
    with client_stack(files, folder, script, proxied=proxied) as stack:
        ran = _run(client, stack)
        verdict = judge(
            stack,
            ran,
            steps=len(replies),
            appends=client.appends,
            websocket=client.websocket,
            asks=client.asks,
        )
        return Outcome(verdict, ran)


def _run(client: Client, stack: Stack) -> Ran:
    place = stack.place
    for name, text in client.files(place).items():
        path = place.home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    command = [str(client.executable), *client.arguments(place)]
    return run_client(command, place, client.environment(place), timeout_s=client.timeout_s)


def work(write: Callable[[str, str], Call], run: Callable[[str], Call]) -> Replies:
    """A file is written, measured and shown, by a client's own tools.

    Args:
        write: the call that writes a file, of its path and content.
        run: the call that runs a shell command.
    """

    def replies(folder: Path) -> tuple[Reply, ...]:
        return (
            Reply("First the file.", (write(str(folder / NOTES), TEXT),)),
            Reply("Now its size.", (run(MEASURE),)),
            Reply("", (run(SHOW),)),
            Reply(LAST),
        )

    return replies


def _written(path: str, content: str) -> Call:
    return Call("write_file", {"path": path, "content": content})


def _commanded(command: str) -> Call:
    return Call("run_command", {"command": command})


def library(
    name: str,
    package: str,
    api: str,
    script: str,
    *,
    venv: str = "",
    replies: Replies | None = None,
    **switches: str,
) -> Client:
    """A library, in a small program of ours.

    Args:
        script: in ``programs``.
        switches: environment of the program.
    """

    def environment(place: Place) -> dict[str, str]:
        told = {"ORIGIN": place.origin, "MODEL": SCRIPTED, "TASK": TASK, "KEY": KEY}
        return told | switches

    return Client(
        name=name,
        package=package,
        api=api,
        executable=INSTALLED / venv / "bin" / "python" if venv else Path(sys.executable),
        arguments=lambda _: [str(PROGRAMS / script)],
        environment=environment,
        replies=replies or work(_written, _commanded),
        venv=venv,
        nightly=bool(venv),
        timeout_s=120.0,
    )


def _code(folder: Path) -> tuple[Reply, ...]:
    """smolagents: code in a block, and ``final_answer`` at the end."""
    steps = (
        f"print(write_file({str(folder / NOTES)!r}, {TEXT!r}))",
        f"print(run_command({MEASURE!r}))",
        f"print(run_command({SHOW!r}))",
        f"final_answer({LAST!r})",
    )
    return tuple(Reply(f"Thought: the next step.\n<code>\n{step}\n</code>") for step in steps)


def libraries() -> tuple[Client, ...]:
    """SDKs and agent libraries."""
    chat = library("openai chat", "openai", "chat", "openai_chat.py")
    responses = library("openai responses", "openai", "responses", "openai_responses.py")
    messages = library("anthropic", "anthropic", "messages", "anthropic_messages.py")
    agents = ("openai-agents", "openai_agents.py")
    langchain = "langchain-openai"
    return (
        chat,
        switched(chat, "streamed", STREAM="1"),
        responses,
        switched(responses, "streamed", STREAM="1"),
        switched(responses, "stored", STREAM="1", STORED="1"),
        messages,
        switched(messages, "streamed", STREAM="1"),
        library("openai-agents chat", agents[0], "chat", agents[1], API="chat"),
        library("openai-agents responses", agents[0], "responses", agents[1], API="responses"),
        library("pydantic-ai", "pydantic-ai-slim", "chat", "pydantic_agent.py"),
        library(langchain, langchain, "chat", "langchain_agent.py", venv=langchain),
        library("litellm", "litellm", "chat", "litellm_chat.py", venv="litellm", **PRICES),
        library(
            "smolagents",
            "smolagents",
            "chat",
            "smolagents_code.py",
            venv="smolagents",
            replies=_code,
        ),
    )


def switched(client: Client, what: str, **switches: str) -> Client:
    """The same client with other switches, as another case."""
    environment = client.environment
    return replace(
        client,
        name=f"{client.name}, {what}",
        environment=lambda place: environment(place) | switches,
    )
