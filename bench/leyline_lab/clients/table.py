"""Sessions of real clients against the proxy: the table in docs/clients.md.

Each client plays its session against the proxy, in front of an engine whose model
follows a script; those that speak chat completions play it against the engine alone, too.
``make clients`` installs them and runs this.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from leyline_proxy.telemetry.logging import configure_logging

from ..console import write_json
from ..harness import markdown
from ..harness.arguments import Arguments
from ..harness.machine import CHECKOUT
from ..harness.report import progress
from ..stand_ins.scripted_model import build_scripted
from .agents import clients
from .cases import Client, play
from .verdict import Verdict

BEGIN = markdown.mark("clients")
COLUMNS = ("client", "version", "API", "session", "turns", "prompt", "cached", "directly")
PINS = CHECKOUT / "deploy" / "clients.txt"


@dataclass(frozen=True, slots=True)
class Row:
    """A client's session through the proxy, and without it if an engine can serve it."""

    client: Client
    version: str
    proxied: Verdict
    direct: Verdict | None

    def cells(self) -> tuple[str, ...]:
        """Return its cells of the table."""
        went = self.proxied
        prompt = f"{went.prompt_tokens[-1]:,}" if went.prompt_tokens else "·"
        return (
            self.client.name,
            self.version,
            self.client.api,
            "fails: " + "; ".join(went.problems) if went.problems else "pass",
            str(went.turns),
            prompt,
            _share(went),
            _share(self.direct) if self.direct else "·",
        )

    def document(self) -> dict[str, Any]:
        """Return it as JSON."""
        verdicts = {"proxied": self.proxied, "direct": self.direct}
        return {
            "client": self.client.name,
            "package": self.client.package,
            "version": self.version,
            "api": self.client.api,
            "passed": not self.proxied.problems,
            **{name: _figures(verdict) for name, verdict in verdicts.items() if verdict},
        }


def _share(verdict: Verdict) -> str:
    if not verdict.prompt_tokens:
        return "·"
    return f"{verdict.cached_tokens[-1] / verdict.prompt_tokens[-1]:.1%}"


def _figures(verdict: Verdict) -> dict[str, Any]:
    return {
        "turns": verdict.turns,
        "sessions": verdict.sessions,
        "prompt_tokens": verdict.prompt_tokens,
        "cached_tokens": verdict.cached_tokens,
        "problems": verdict.problems,
    }


def installed_version(client: Client) -> str:
    """Return the client's version: as pinned, or as installed beside the tests."""
    if not client.venv:
        return version(client.package)
    for line in PINS.read_text(encoding="utf-8").splitlines():
        words = line.split()
        if line.startswith(("npm", "pip")) and words[1] == client.venv:
            return words[2].replace("==", "@").rpartition("@")[2]
    raise LookupError(f"{PINS} has no line for {client.venv}")


def play_all(chosen: Sequence[Client]) -> Iterator[Row]:
    """Yield one row per client, as it ends."""
    with tempfile.TemporaryDirectory() as name, progress("clients", len(chosen)) as step:
        folder = Path(name)
        files = build_scripted(folder / "model")
        for client in chosen:
            place = folder / "place"
            direct = None
            if client.speaks_to_engines:
                direct = play(client, files, place, proxied=False).verdict
            yield Row(client, installed_version(client), play(client, files, place).verdict, direct)
            step()


def main() -> int:
    """Run, print, write; returns 1 if a client failed."""
    parser = Arguments(__doc__)
    parser.add_argument("names", nargs="*", help="folders or packages of clients; all by default")
    parser.add_argument("--write", type=Path, help="a page to write the table into")
    given = parser.parse_args()
    configure_logging("error", "console")
    wanted = [
        client
        for client in clients()
        if not given.names or {client.name, client.venv, client.package} & set(given.names)
    ]
    rows = list(play_all(wanted))
    table = markdown.table(COLUMNS, (row.cells() for row in rows), words=len(COLUMNS))
    print(table)
    write_json(given.json, [row.document() for row in rows])
    if given.write is not None:
        markdown.write(table, given.write, BEGIN)
    return int(any(row.proxied.problems for row in rows))
