"""An engine with a scripted model whose cache can be emptied, and the harness's command."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import typer
from outside_agent import OPENING, STEPS
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from typer.testing import CliRunner

from leyline_lab.outside.command import command
from leyline_lab.stand_ins.scripted_model import (
    SCRIPTED,
    Call,
    Prompt,
    Reply,
    build_scripted,
    scripted_model,
)
from leyline_lab.stand_ins.serving import serving

AGENT = Path(__file__).with_name("outside_agent.py")
ENGINES = 4
"""One for each time that the cache is emptied, and one more."""


def reads_pages(prompt: Prompt) -> tuple[Reply, bool]:
    """Read page after page, then say the number that the prompt shows; beta's is misread."""
    task = next(text for role, text in prompt.messages if OPENING in text)
    calls = sum(role == "assistant" for role, _ in prompt.messages)
    if calls < STEPS:
        return Reply(calls=(Call("read", {}),)), True
    shown = [text for _, text in prompt.messages if "number=" in text]
    number = shown[-1].rpartition("number=")[2][:2] if shown else "none"
    return Reply("It is 0." if task.endswith("beta") else f"It is {number}."), True


class Emptied:
    """One engine after the other: ``POST /flush_cache`` turns to the next, whose cache is empty."""

    def __init__(self, engines: Iterator[ASGIApp]) -> None:
        self._engines = engines
        self._engine = next(engines)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI scope."""
        if scope["type"] == "http" and scope["path"] == "/flush_cache":
            self._engine = next(self._engines)
            await Response("emptied")(scope, receive, send)
            return
        if scope["type"] != "lifespan":
            await self._engine(scope, receive, send)


@dataclass(frozen=True, slots=True)
class Harness:
    """The command, in front of one engine."""

    upstream: str
    out: Path
    empties: bool = True
    """Empty the engine's cache in front of each run."""

    def arguments(self, *options: str) -> list[str]:
        """The command's arguments; later options replace earlier ones."""
        flush = f"import httpx; httpx.post('{self.upstream}/flush_cache').raise_for_status()"
        between = ("--between", f'{sys.executable} -c "{flush}"') if self.empties else ()
        return [
            *("--benchmark", "custom", "--command", f"{sys.executable} {AGENT}"),
            *("--upstream", self.upstream, "--model", SCRIPTED, "--out", str(self.out)),
            *("--policy", "truncate_older_than:n=2,max_chars=40"),
            *between,
            *options,
        ]

    def __call__(self, *options: str) -> tuple[int, str]:
        """Run the command; its exit code and output."""
        app = typer.Typer()
        app.command()(command)
        result = CliRunner().invoke(app, self.arguments(*options))
        return result.exit_code, result.output


@contextmanager
def scripted_engines(folder: Path) -> Iterator[str]:
    """The origin of an engine that can be emptied a few times."""
    files = build_scripted(folder)
    with ExitStack() as stack:
        engines = [
            stack.enter_context(scripted_model(files, reads_pages)).app for _ in range(ENGINES)
        ]
        yield stack.enter_context(serving(Emptied(iter(engines))))
