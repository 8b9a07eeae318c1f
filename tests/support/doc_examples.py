"""Runs the code that the documentation shows, against a stack that runs."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import tomllib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import SkipTest

import httpx
import jsonschema
import pytest
import yaml
from sybil import Document, Example, Region
from sybil.parsers.markdown import CodeBlockParser, SkipParser
from sybil.typing import Parser
from typer.testing import CliRunner

from leyline_policies import Registry
from leyline_policies.config import parse_policies
from leyline_policies.registry import built_in_candidates
from leyline_proxy.cli import build_app
from leyline_proxy.settings import Settings, load_settings

MODEL = "leyline-recall"
LEYLINE = str(Path(sys.executable).with_name("leyline"))
UP = "Leyline is up."
"""The line that `leyline serve` prints then."""

LONGEST_S = 180.0
"""For one block; some start a server, on a machine that is busy with other tests."""

NOT_RUN: Mapping[str, str] = {
    "docker": "needs Docker",
    "helm": "needs a cluster",
    "kubectl": "needs a cluster",
    "sglang": "needs a GPU",
    "vllm": "needs a GPU",
    "pip": "would install",
    "npm": "would install",
    "make": "is what runs this test, or takes minutes",
    "aider": "an agent; the laboratory runs it",
    "claude": "an agent; the laboratory runs it",
    "cline": "an agent; the laboratory runs it",
    "cn": "an agent; the laboratory runs it",
    "codex": "an agent; the laboratory runs it",
    "copilot": "an agent; the laboratory runs it",
    "mini": "an agent; the laboratory runs it",
    "opencode": "an agent; the laboratory runs it",
    "pi": "an agent; the laboratory runs it",
    "qwen": "an agent; the laboratory runs it",
}
"""Programs that examples name and tests don't run, and why. All else in a block is run."""

NOT_INSTALLED = frozenset(
    {
        "crewai",
        "deepagents",
        "dspy",
        "google.adk",
        "langchain_openai",
        "litellm",
        "openhands",
        "semantic_kernel",
        "smolagents",
        "strands",
    }
)
"""Libraries whose examples are only compiled: the laboratory brings and runs them."""

_PREAMBLE = r"""
set -euo pipefail
curl() { command curl --fail-with-body --silent --show-error "$@"; }
leyline() { # the test runs the command, most of them in its own process
    printf '%s\0' "$@" >"$DESK/asked"; printf '\0' >>"$DESK/asked"; env -0 >>"$DESK/asked"
    cat >"$DESK/in"
    echo "$PWD" >&"$ASK"; local status; read -r status <&"$ANSWER"
    cat "$DESK/out"; cat "$DESK/err" >&2
    return "$status"
}
"""

Done = tuple[int, str, str]
"""Exit status, standard output and error of a command."""

_AGAIN = "<!-- run with all above -->\n"
_PRINTS = re.compile(r"^<!-- prints -->\n```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(slots=True)
class Examples:
    """Evaluates the examples of one page, in order; the page keeps the state they leave.

    Attributes:
        folder: working directory of the page.
        places: replacements, by the text's name for an address or a path.
        origin: the proxy's address.
        served: outcomes of servers that were started already, by command and settings; the same
            one isn't started again for the next page.
        values_schema: of the Helm chart's values.
        engine: an engine for servers whose command names none, which would load one themselves;
            None has them do so.
        skipped: reasons of examples that say why they aren't run.
    """

    folder: Path
    places: Mapping[str, str]
    origin: str
    patch: pytest.MonkeyPatch
    served: dict[str, Done]
    values_schema: Path
    engine: str | None = None
    skipped: list[str] = field(default_factory=list)
    ran: int = 0
    printed: str = ""
    program: str = ""
    """The page's blocks of Python so far."""

    def run(self, page: Path) -> None:
        """Evaluate all examples of a page.

        Raises:
            AssertionError: for the first that fails; names its place.
        """
        document = Document.parse(str(page), *self._parsers())
        try:
            for example in document:
                self._evaluate(example)
        finally:
            if document.namespace:
                document.namespace.clear()
                with _untidy():
                    asyncio.set_event_loop(None)  # some libraries keep one
                    gc.collect()

    def _evaluate(self, example: Example) -> None:
        try:
            example.evaluate()
        except SkipTest as reason:
            self.skipped.append(str(reason))
        except Exception as error:
            place = f"{Path(example.path).name}:{example.line}"
            raise AssertionError(f"{place}: {type(error).__name__}: {error}") from error

    def _parsers(self) -> Iterator[Parser]:
        yield SkipParser()
        yield self._printed_blocks
        for language, evaluate in (
            ("python", self.python),
            ("sh", self.shell),
            ("bash", self.shell),
            ("json", self.json),
            ("yaml", self.yaml),
            ("toml", self.toml),
        ):
            yield CodeBlockParser(language, self._counted(evaluate))

    def _counted(self, evaluate: Callable[[Example, str], None]) -> Callable[[Example], None]:
        def run(example: Example) -> None:
            text = re.sub(r"\bMODEL\b", MODEL, str(example.parsed))
            for place, here in self.places.items():
                text = text.replace(place, here)
            evaluate(example, text)
            self.ran += 1

        return run

    def _printed_blocks(self, document: Document) -> Iterator[Region]:
        for found in _PRINTS.finditer(document.text):
            yield Region(found.start(), found.end(), found[1], self.prints)

    def prints(self, example: Example) -> None:
        """Check that the previous example printed these lines in this order; of numbers, only 0 has
        to be the same."""
        printed = iter(self.printed.splitlines())
        for line in str(example.parsed).splitlines():
            pattern = re.sub(r"\d+", _number, re.escape(line.strip())).replace("…", ".*")
            assert any(re.fullmatch(pattern, each.strip()) for each in printed), (
                f"{line!r} isn't in {self.printed!r}, or not in its place"
            )
        self.ran += 1

    def python(self, example: Example, text: str) -> None:
        """Runs in the page's namespace; with a comment that says so, all above runs again first."""
        self.program = self.program + text
        again = example.document.text[: example.start].endswith(_AGAIN)
        whole = self.program if again else "\n" * (example.line + 1) + text
        code = compile(whole, example.path, "exec")
        out = io.StringIO()
        try:
            with contextlib.redirect_stdout(out), _untidy():
                exec(code, example.namespace)  # noqa: S102
        except ModuleNotFoundError as error:
            if error.name not in NOT_INSTALLED:
                raise
        self.printed = out.getvalue()

    def shell(self, _example: Example, text: str) -> None:
        """Runs in bash; each command must succeed."""
        ask_in, ask_out = os.pipe()
        answer_in, answer_out = os.pipe()
        desk = self.folder / "desk"
        desk.mkdir(exist_ok=True)
        shims = "".join(f"{name}() {{ :; }}\n" for name in NOT_RUN)
        environment = {
            **{name: value for name, value in os.environ.items() if "LEYLINE" not in name},
            "HOME": str(self.folder),
            "DESK": str(desk),
            "ASK": str(ask_out),
            "ANSWER": str(answer_in),
        }
        with (desk / "printed").open("w+", encoding="utf-8") as printed:
            process = subprocess.Popen(
                ["bash", "-c", _PREAMBLE + shims + text],
                cwd=self.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=subprocess.STDOUT,
                pass_fds=(ask_out, answer_in),
            )
            os.close(ask_out)
            os.close(answer_in)
            watch = threading.Timer(LONGEST_S, process.kill)
            watch.start()
            # Bash that was killed takes no answer; its status says so.
            with (
                contextlib.suppress(BrokenPipeError),
                os.fdopen(ask_in) as asked,
                os.fdopen(answer_out, "w") as answer,
            ):
                while place := asked.readline():
                    print(self._answer(desk, Path(place.rstrip("\n"))), file=answer, flush=True)
            status = process.wait()
            watch.cancel()
            printed.seek(0)
            self.printed = printed.read()
        assert status != -signal.SIGKILL, f"longer than {LONGEST_S:.0f} s: {self.printed}"
        assert status == 0, f"exit status {status}: {self.printed}"

    def _answer(self, desk: Path, place: Path) -> int:
        """Run the command that bash asks for, and leave what it wrote; its exit status."""
        asked, _, environment = (desk / "asked").read_text(encoding="utf-8").partition("\0\0")
        arguments = asked.split("\0")
        settings = [one for one in environment.split("\0") if one.startswith("LEYLINE_")]
        key = "\0".join([asked, *settings])
        if arguments[0] != "serve":
            done = self._run(arguments, settings, place, (desk / "in").read_bytes())
        elif key in self.served:
            done = self.served[key]
        else:
            done = self.served[key] = self._serve(arguments, settings, place)
        status, out, err = done
        (desk / "out").write_text(out, encoding="utf-8")
        (desk / "err").write_text(err, encoding="utf-8")
        return status

    def _run(
        self, arguments: Sequence[str], settings: Sequence[str], place: Path, given: bytes
    ) -> Done:
        """Run a command line exactly as written, in this process."""
        with self.patch.context() as patch:
            for setting in settings:
                name, _, value = setting.partition("=")
                patch.setenv(name, value)
            patch.chdir(place)
            found = CliRunner().invoke(build_app(), list(arguments), input=given)
        return found.exit_code, found.stdout, found.stderr

    def _serve(self, arguments: Sequence[str], settings: Sequence[str], place: Path) -> Done:
        """Start a server with a command line exactly as written, and stop it once it is up."""
        environment = {name: value for name, value in os.environ.items() if "LEYLINE" not in name}
        environment |= dict(setting.split("=", 1) for setting in settings)
        lent = [] if self.engine is None or "--upstream" in arguments else [self.engine]
        behind = [part for url in lent for part in ("--upstream", url)]
        with (self.folder / "desk" / "served").open("w+", encoding="utf-8") as output:
            process = subprocess.Popen(
                [LEYLINE, *arguments, *behind, "--port", "0"],
                cwd=place,
                env=environment | {"OMP_NUM_THREADS": "1"},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            try:
                deadline = time.monotonic() + LONGEST_S
                while process.poll() is None and time.monotonic() < deadline:
                    if UP in Path(output.name).read_text(encoding="utf-8"):
                        process.send_signal(signal.SIGTERM)
                        break
                    time.sleep(0.05)
                status = process.wait(LONGEST_S)
            finally:
                process.kill()
                process.wait()
            output.seek(0)
            shown = output.read()
        return status if UP in shown else status or 1, shown, ""

    def json(self, _example: Example, text: str) -> None:
        """Requests are sent; all else is only read."""
        given = json.loads(text)
        if "messages" in given and "model" in given:
            self._post("/v1/chat/completions", {"max_tokens": 8, **given}, 200)
        elif "predicate" in given:
            self._post("/v1/leyline/claims", given, 201)
        elif "role" in given:
            self._post("/v1/chat/completions", _conversation(given), 200)
        elif "edits" in given.get("context_management", ()):
            body = _conversation({"role": "tool", "tool_call_id": "c1", "content": "x"})
            self._post("/v1/chat/completions", body | given, 200)

    def _post(self, path: str, body: Mapping[str, Any], status: int) -> None:
        answer = httpx.post(f"{self.origin}{path}", json=body, timeout=LONGEST_S)
        assert answer.status_code == status, answer.text

    def yaml(self, _example: Example, text: str) -> None:
        """A file of policies, values of the Helm chart, or settings."""
        given = yaml.safe_load(text)
        if "policies" in given:
            parse_policies(text, Registry(built_in_candidates()))
        elif "proxy" in given:
            jsonschema.validate(given, json.loads(self.values_schema.read_text(encoding="utf-8")))
        else:
            path = self.folder / "config.yaml"
            path.write_text(text, encoding="utf-8")
            assert isinstance(load_settings(path), Settings)

    def toml(self, example: Example, text: str) -> None:
        """Read; an entry point of a policy must be one that the page defines."""
        points = tomllib.loads(text).get("project", {}).get("entry-points", {})
        for target in points.get("leyline.policies", {}).values():
            assert callable(example.namespace[target.partition(":")[2]])


def _number(found: re.Match[str]) -> str:
    return "0" if found[0] == "0" else r"(?!0(?!\d))\d+"


@contextlib.contextmanager
def _untidy() -> Iterator[None]:
    """Examples leave their clients open, as short scripts do; that is no fault of the page."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        yield


def _conversation(message: Mapping[str, Any]) -> dict[str, Any]:
    """A chat request with a message in its midst."""
    function = {"name": "bash", "arguments": "{}"}
    calls = [{"id": "c1", "type": "function", "function": function}]
    said = {"role": "assistant", "content": None, "tool_calls": calls}
    messages = [{"role": "user", "content": "Look."}, said, dict(message)]
    return {
        "model": MODEL,
        "max_tokens": 8,
        "messages": [*messages, {"role": "user", "content": "And now?"}],
    }
