"""``leyline audit``: checks the log, and shows a session's edits."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from .output import print_json, shown, usage_error, usage_errors
from .prove import prove

if TYPE_CHECKING:
    from ..audit.chain import AuditKey
    from ..audit.effects import EditView
    from ..audit.reading import AuditVerdict, LogFiles

BROKEN = 1

_Paths = Annotated[
    list[Path] | None,
    typer.Argument(help="Logs, or folders with logs \\[LEYLINE_AUDIT_FILE].", show_default=False),
]
_KeyFile = Annotated[
    Path | None, typer.Option(help="File with one key per line \\[LEYLINE_AUDIT_KEY].")
]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def register(app: typer.Typer) -> None:
    """Add the group to ``app``."""
    audit = typer.Typer(no_args_is_help=True, help="Read the audit log of edits.")
    audit.command(
        name="verify", epilog="Example:  leyline audit verify /var/log/leyline/audit.jsonl"
    )(verify)
    audit.command(name="show", epilog="Example:  leyline audit show --session s-4f audit.jsonl")(
        show
    )
    audit.command(name="digest", epilog="Example:  leyline audit digest --key-file k < text")(
        digest
    )
    audit.command(name="prove", epilog="Example:  leyline audit prove --session s-4f")(prove)
    app.add_typer(audit, name="audit")


def verify(
    paths: _Paths = None,
    head: Annotated[
        str | None, typer.Option(help="Hash, noted elsewhere, of a record that must be there.")
    ] = None,
    key_file: _KeyFile = None,
    as_json: _Json = False,
) -> None:
    """Check the chain of each log, including its earlier files.

    Exits with 0 when all logs are intact, and with 1 when one isn't. It then names the first bad
    line and says whether it was edited, removed, inserted, reordered or cut off.
    """
    from ..audit import reading

    keys = _keys(key_file)
    with usage_errors("audit", reading.KeyNeededError, OSError):
        verdicts = [reading.verify(log, keys, head) for log in _logs(paths)]
    if as_json:
        print_json([_verdict_document(verdict) for verdict in verdicts])
    else:
        for verdict in verdicts:
            _print_verdict(verdict)
    if not all(verdict.good for verdict in verdicts):
        raise typer.Exit(BROKEN)


def show(
    paths: _Paths = None,
    *,
    session: Annotated[str | None, typer.Option(help="Only this session.")] = None,
    tenant: Annotated[str | None, typer.Option(help="Only this tenant.")] = None,
    mode: Annotated[
        str | None, typer.Option(help="Only edits of this mode: amortize, forget or exact.")
    ] = None,
    since: Annotated[
        datetime | None, typer.Option(help="Only turns at or after this time, in UTC.")
    ] = None,
    until: Annotated[datetime | None, typer.Option(help="Only turns before this time.")] = None,
    key_file: _KeyFile = None,
    as_json: _Json = False,
) -> None:
    """Show which edits were truly erased, and which may still influence what the model says; also
    messages in quarantine, and proofs of forgets.

    Checks the logs first. When one isn't intact, it still shows the edits and exits with 1.
    """
    from ..audit import reading
    from ..audit.effects import edits_of

    logs, keys = _logs(paths), _keys(key_file)
    with usage_errors("audit", OSError):
        chain = _chain_state(logs, keys)
        found = [
            record
            for log in logs
            for record in reading.records(log)
            if session in (None, record.get("session")) and tenant in (None, record.get("tenant"))
        ]
    first, last = _moment(since), _moment(until)
    edits = [
        view
        for view in edits_of(found)
        if (not first or view.time >= first)
        and (not last or view.time < last)
        and mode in (None, view.edit["mode"])
    ]
    verdicts = [] if mode else [each for each in found if _is_verdict(each, first, last)]
    if as_json:
        print_json({**_edits_document(edits, chain), **_verdicts_document(verdicts)})
    else:
        _print_verdicts(verdicts)
        _print_edits(edits, chain)
    if chain == "broken":
        raise typer.Exit(BROKEN)


def digest(key_file: _KeyFile = None) -> None:
    """Print the keyed hash of a text on standard input, so that you can look for it in the log.

    When the text is the whole text of an edited message, its hash is in ``removed`` or
    ``inserted`` of that edit.
    """
    import sys

    keys = _keys(key_file)
    if not keys:
        raise usage_error(
            "audit", "hashing a text needs the key: use --key-file or LEYLINE_AUDIT_KEY"
        )
    text = sys.stdin.buffer.read().decode("utf-8", "surrogateescape")
    for key in keys:
        typer.echo(key.digest(text))


def _logs(paths: list[Path] | None) -> list[LogFiles]:
    from ..audit.reading import LogNotFoundError, find_logs

    default = os.environ.get("LEYLINE_AUDIT_FILE")
    wanted = paths or ([Path(default)] if default else [])
    if not wanted:
        raise usage_error("audit", "name a log, or set LEYLINE_AUDIT_FILE")
    with usage_errors("audit", LogNotFoundError):
        return [log for path in wanted for log in find_logs(path)]


def _keys(key_file: Path | None) -> list[AuditKey]:
    from ..audit.keys import audit_keys

    with usage_errors("audit", ValueError):
        return audit_keys(key_file)


def _chain_state(logs: list[LogFiles], keys: list[AuditKey]) -> str:
    from ..audit.reading import KeyNeededError
    from ..audit.reading import verify as check

    try:
        return "good" if all(check(log, keys).good for log in logs) else "broken"
    except KeyNeededError:
        return "not checked"


def _moment(value: datetime | None) -> str:
    """Return a time in the form of records, for comparison as text."""
    if value is None:
        return ""
    stamp = (value if value.tzinfo else value.replace(tzinfo=UTC)).astimezone(UTC)
    return stamp.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _verdict_document(verdict: AuditVerdict) -> dict[str, Any]:
    checked, finding = verdict.checked, verdict.finding
    return {
        "log": str(verdict.path),
        "good": verdict.good,
        "records": checked.records,
        "first": checked.first_seq,
        "last": checked.head.seq if checked.head else None,
        "head": checked.head.hash if checked.head else None,
        "lost": checked.lost,
        "torn": checked.torn,
        "damage": finding.damage if finding else None,
        "file": str(verdict.file) if verdict.file else None,
        "line": finding.line if finding else None,
        "why": finding.why if finding else None,
    }


def _print_verdict(verdict: AuditVerdict) -> None:
    console = Console(highlight=False, soft_wrap=True)
    checked, finding = verdict.checked, verdict.finding
    name = escape(str(verdict.path))
    if finding is not None:
        where = escape(str(verdict.file or verdict.path))
        line = f" line {finding.line}" if finding.line else ""
        console.print(f"[red]{name}: {finding.damage}[/red]: {where}{line}: {escape(finding.why)}")
        return
    if checked.head is None:
        console.print(f"[yellow]{name}: empty[/yellow]")
        return
    span = f"records {checked.first_seq} to {checked.head.seq}"
    console.print(f"[green]{name}: good[/green], {span}, head {checked.head.hash}")
    if checked.first_seq > 1:
        console.print("  earlier files were not read")
    if checked.lost:
        console.print(f"  {checked.lost} records could not be written; the log shows where")
    if checked.torn:
        console.print(f"  {checked.torn} partial lines, left by a crash and recorded since")


def _is_verdict(record: Mapping[str, Any], first: str, last: str) -> bool:
    """Return True for a readable record of a quarantine or a proof between two times."""
    time, kind = record.get("time"), record.get("kind")
    between = isinstance(time, str) and time >= first and (not last or time < last)
    needed = {"quarantine": ("session", "span", "cause"), "proof": ("session", "verdict")}
    names = needed.get(str(kind), ())
    return between and bool(names) and all(isinstance(record.get(each), str) for each in names)


def _verdicts_document(records: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        name: [each for each in records if each["kind"] == kind]
        for name, kind in (("quarantines", "quarantine"), ("proofs", "proof"))
    }


def _print_verdicts(records: list[dict[str, Any]]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    for each in records:
        when, session = _text(each["time"][:19].replace("T", " ")), _text(each["session"])
        if each["kind"] == "quarantine":
            what = f"quarantine of {_text(each['span'])}, {_text(each['cause'])}"
        else:
            spans = each.get("spans")
            some = f"{len(spans)} messages" if isinstance(spans, list) and spans else "everything"
            what = f"forget of {some}: [bold]{_text(each['verdict']).replace('_', ' ')}[/bold]"
        console.print(f"{when}  {session}  {what}")


def _edits_document(edits: list[EditView], chain: str) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "chain": chain,
        "effects": dict(Counter(view.effect for view in edits)),
        "may_influence": sum(view.may_influence for view in edits),
        "edits": [asdict(view) for view in edits],
    }


def _print_edits(edits: list[EditView], chain: str) -> None:
    from rich.table import Table

    from ..audit.effects import MEANINGS

    console = Console(highlight=False)
    table = Table(box=None, pad_edge=False)
    for name in ("time", "session", "turn", "message", "cause", "mode", "tokens", "effect"):
        table.add_column(name, overflow="fold")
    for view in edits:
        edit = view.edit
        place = "-" if edit["message"] is None else str(edit["message"])
        later = "" if view.erased_by is None else f"; erased by turn {view.erased_by}"
        table.add_row(
            _text(view.time[:19].replace("T", " ")),
            _text(view.session),
            str(view.index),
            f"{place} {_text(edit['role'])}",
            _text(edit["cause"]),
            _text(edit["mode"]),
            f"{_count(edit['removed_tokens'])}→{_count(edit['inserted_tokens'])}",
            view.effect + later,
        )
    console.print(table)
    for effect, number in Counter(view.effect for view in edits).items():
        console.print(f"{number} [bold]{effect}[/bold]: {MEANINGS[effect]}")
    influence = sum(view.may_influence for view in edits)
    console.print(f"{influence} of {len(edits)} edits may still influence the model")
    colour = {"good": "green", "broken": "red"}.get(chain, "yellow")
    console.print(f"chain: [{colour}]{chain}[/{colour}]")


def _text(text: str) -> str:
    return shown(text, "\N{REPLACEMENT CHARACTER}")


def _count(tokens: int | None) -> str:
    return "?" if tokens is None else str(tokens)
