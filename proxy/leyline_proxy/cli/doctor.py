"""``leyline doctor``: examines an engine, or the settings of a proxy."""

from __future__ import annotations

import ssl
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from leyline_engine.contract import CAPABILITY_PATH, Capability, Mismatch, judge

from .client_tls import Ca, Cert, Key, context_of, tls_refusal
from .flags import read_settings, sources_of, with_flags
from .output import print_json, shown, usage_error, usage_errors

if TYPE_CHECKING:
    import httpx

    from ..doctor import Finding

NOT_WELL = 1

Verify = ssl.SSLContext | bool

_MOST_BYTES = 1024 * 1024

_EPILOG = """[bold]Examples[/bold]

Does this engine splice?  leyline doctor http://127.0.0.1:8790

Would this proxy work?

leyline doctor --config leyline.yaml --prometheus http://127.0.0.1:9090

Without a URL, it takes the flags, variables and files of leyline serve.
"""
_SIGNS = {"ok": "[green]✓[/green]", "warn": "[yellow]![/yellow]", "fail": "[red]✗[/red]"}


class Answered(Capability, frozen=True, kw_only=True):
    """An engine's capability document, or a proxy's, which adds its own promise."""

    recurrent_edits: str = ""
    """Of a proxy whose engine's model has recurrent layers; empty of others."""


class Unreachable(Exception):  # noqa: N818 - a finding, no failure of ours
    """No capability document is available; the message gives the reason."""


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command(name="doctor", epilog=_EPILOG)(doctor)


@with_flags
def doctor(
    url: Annotated[
        str | None,
        typer.Argument(
            help="Base URL of an engine, or of a Leyline proxy in front of one; without it, "
            "the settings are examined.",
            show_default=False,
        ),
    ] = None,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds to wait for each answer.")
    ] = 10.0,
    prometheus: Annotated[
        str | None, typer.Option(help="URL of the Prometheus that should scrape the proxy.")
    ] = None,
    ca: Ca = None,
    client_cert: Cert = None,
    client_key: Key = None,
    flags: Mapping[str, Any],
) -> None:
    """Print an engine's capability document and whether the engine splices. Without a URL, examine
    the settings: find problems that a proxy would run into, and say how to fix them.

    Exits with 0 when all is well. Exits with 1 when a check fails, or the engine doesn't splice or
    can't be reached.
    """
    if url is None:
        _examine(flags, prometheus, timeout, as_json)
    elif prometheus is not None or any(value is not None for value in flags.values()):
        raise usage_error(
            "doctor", "Give a URL to ask an engine, or settings to examine them, not both."
        )
    else:
        with usage_errors("doctor", ValueError):
            verify = context_of(ca, client_cert, client_key)
        _ask_engine(url, timeout, as_json, verify)


def _examine(
    flags: Mapping[str, Any], prometheus: str | None, timeout: float, as_json: bool
) -> None:
    from ..doctor import document, healthy

    findings = _findings(flags, prometheus, timeout)
    if as_json:
        print_json(document(findings))
    else:
        _print_findings(findings)
    if not healthy(findings):
        raise typer.Exit(NOT_WELL)


def _findings(flags: Mapping[str, Any], prometheus: str | None, timeout: float) -> list[Finding]:
    import asyncio

    from ..doctor import Situation, checks_for, config_findings, examine
    from ..doctor.examination import findings_of_part, without_missing
    from ..settings.faults import faults_of
    from ..settings.readable import ReadablePart, readable_part
    from ..telemetry.logging import configure_logging

    # The findings contain everything that the parts would log.
    configure_logging("error", "console")
    broken: list[Finding] = []
    try:
        part = ReadablePart(read_settings(flags))
    except (OSError, ValueError) as error:
        sources = sources_of(flags)
        broken = config_findings(faults_of(error, sources))
        readable = readable_part(partial(read_settings, flags), error)
        if readable is None:
            return broken
        part = readable
        for each in part.later:
            broken += config_findings(faults_of(each, sources))
    checks = checks_for(Situation(part.settings, flags["config"], prometheus, timeout))
    checks = without_missing(checks, part)
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("Examining", total=len(checks))

        def ended(name: str) -> None:
            bar.update(task, advance=1, description=f"Examined {name}")

        return findings_of_part(broken, part, asyncio.run(examine(checks, ended=ended)))


def _print_findings(findings: Sequence[Finding]) -> None:
    console = Console(highlight=False)
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column()
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        if finding.status in _SIGNS:
            text = shown(finding.detail)
            if finding.fix:
                text += f"\n[bold]fix:[/bold] {shown(finding.fix)}"
            table.add_row(_SIGNS[finding.status], shown(finding.name), text)
    console.print(table)
    for finding in findings:
        if finding.status == "skip":
            console.print(f"[dim]- {finding.name}: {shown(finding.detail)}[/dim]")
    count = {sign: sum(finding.status == sign for finding in findings) for sign in _SIGNS}
    tone = "red" if count["fail"] else "yellow" if count["warn"] else "green"
    console.print(
        f"[{tone}]{count['ok']} ok, {count['warn']} with warnings, {count['fail']} failed[/{tone}]"
    )


def _ask_engine(url: str, timeout: float, as_json: bool, verify: Verify) -> None:
    try:
        capability = fetch_capability(url, timeout, verify)
    except Unreachable as finding:
        if as_json:
            typer.echo(msgspec.json.encode({"splices": False, "error": str(finding)}).decode())
        else:
            Console(stderr=True).print(f"[red]{escape(str(finding))}[/red]")
        raise typer.Exit(NOT_WELL) from finding
    effects, mismatch = _reasoning_edits(url, timeout, verify), judge(capability)
    if as_json:
        document = msgspec.to_builtins(capability)
        if not capability.recurrent_edits:
            del document["recurrent_edits"]
        document["mismatch"] = None if mismatch is None else msgspec.to_builtins(mismatch)
        if effects is not None:
            document["reasoning_edits"] = effects
        print_json(document)
    else:
        _print(capability, mismatch)
        if effects is not None:
            from ..doctor.reasoning import told

            Console().print(f"Stripped thinking: {told(effects)}.", highlight=False)
    if mismatch is not None or not capability.splices:
        raise typer.Exit(NOT_WELL)


def fetch_capability(url: str, timeout: float, verify: Verify = True) -> Answered:
    """Return the capability document of the engine or proxy at ``url``.

    Args:
        timeout: seconds for the whole answer.
        verify: as in httpx.

    Raises:
        Unreachable: no answer, no document, or one that doesn't follow the contract.
    """
    import httpx

    base = url if "://" in url else f"http://{url}"
    base = base.rstrip("/").removesuffix("/v1")
    asked = base + CAPABILITY_PATH
    head, _, tail = base.rpartition("@")
    base = f"{head.partition('://')[0]}://{tail}" if head else base  # without credentials
    try:
        response = _get(asked, timeout, verify)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        reason = tls_refusal(error) or str(error) or type(error).__name__
        raise Unreachable(f"{base} can't be reached: {reason}") from error
    if response.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        raise Unreachable(
            f"{base} needs a key (status {response.status_code}): use the proxy's settings, "
            "LEYLINE_UPSTREAM_API_KEY and --upstream URL."
        )
    if response.status_code != httpx.codes.OK:
        raise Unreachable(
            f"{base} answers, but {CAPABILITY_PATH} returns {response.status_code}: this engine "
            "runs without the Leyline plugin, so nothing will be spliced."
        )
    try:
        return msgspec.json.decode(response.content, type=Answered)
    except msgspec.DecodeError as error:
        raise Unreachable(f"{base} returns no valid capability document: {error}") from error


def _reasoning_edits(url: str, timeout: float, verify: Verify) -> dict[str, int] | None:
    """Return what the other setting of ``reasoning_edits`` would have done; None if this isn't a
    proxy that shows its metrics."""
    import httpx

    try:
        from ..doctor.reasoning import effects_in
    except ModuleNotFoundError:  # an engine's installation asks an engine
        return None
    base = url if "://" in url else f"http://{url}"
    try:
        answer = _get(base.rstrip("/").removesuffix("/v1") + "/metrics", timeout, verify)
    except (httpx.HTTPError, httpx.InvalidURL):
        return None
    if answer.status_code != httpx.codes.OK or "leyline_build_info" not in answer.text:
        return None
    try:
        return effects_in(answer.text)
    except ValueError:
        return None


def _get(url: str, timeout: float, verify: Verify) -> httpx.Response:
    """Return a small document that arrives completely within ``timeout`` seconds."""
    import httpx

    until = time.monotonic() + timeout
    content = bytearray()
    with httpx.stream("GET", url, timeout=timeout, verify=verify) as response:
        for chunk in response.iter_bytes():
            content += chunk
            if len(content) > _MOST_BYTES or time.monotonic() > until:
                raise httpx.ReadTimeout("the answer doesn't end")
    return httpx.Response(response.status_code, content=bytes(content))


def _print(capability: Answered, mismatch: Mismatch | None) -> None:
    console = Console(highlight=False)
    table = Table("Fact", "Value", title="Capability", title_justify="left")
    # Its refusals are listed below.
    facts = msgspec.structs.replace(capability, refusals=())
    for name, value in _rows(msgspec.to_builtins(facts)):
        table.add_row(name, escape(value))
    console.print(table)
    if mismatch is not None:
        console.print(f"[red]Versions don't fit: {escape(str(mismatch))}[/red]")
        console.print(f"  [bold]{escape(mismatch.fix)}[/bold] (docs/compatibility.md)")
    elif capability.splices:
        console.print("[green]This engine splices.[/green]")
    else:
        reason = capability.unsupported_reason or "it doesn't say why"
        console.print(f"[red]This engine does not splice: {escape(reason)}[/red]")
    _print_state(console, capability)
    for refusal in capability.refusals:
        fix = refusal.fix or "the engine names no remedy"
        console.print(f"  {escape(refusal.what)}: [bold]{escape(fix)}[/bold]")


def _print_state(console: Console, capability: Answered) -> None:
    from ..model.states import RETAINED_TURNS, needs_slots, state_words

    if words := state_words(capability, RETAINED_TURNS):
        console.print(f"State per sequence: {escape(words)}.")
    if capability.recurrent_edits:
        console.print(f"recurrent_edits: {escape(capability.recurrent_edits)}.")
    if fix := needs_slots(capability, RETAINED_TURNS):
        console.print(f"[yellow]Few slots for states.[/yellow] {escape(fix)}")


def _rows(document: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for name, value in document.items():
        if isinstance(value, dict):
            rows += _rows(value, f"{prefix}{name}.")
        elif isinstance(value, (list, tuple)):
            rows.append((prefix + name, ", ".join(map(str, value)) or "none"))
        else:
            rows.append((prefix + name, "none" if value in (None, "") else str(value)))
    return rows
