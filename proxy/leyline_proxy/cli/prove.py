"""``leyline audit prove``: makes a running proxy forget a session, and prove it."""

from __future__ import annotations

import ssl
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO
from urllib.parse import quote

import msgspec
import typer
from rich.console import Console
from rich.markup import escape

from .client_tls import Ca, Cert, Key, context_of, tls_refusal
from .output import usage_error, usage_errors

if TYPE_CHECKING:
    from ..audit.chain import AuditKey

NOT_PROVEN = 1

_PROXY = "http://127.0.0.1:8790"
_MARGIN_S = 45.0
"""Seconds that engines may take, beside the time to wait for running requests."""

_SKEW = timedelta(minutes=5)
"""Difference between the clocks of the proxy and of this machine, at most."""

_MEMBERS = ("engines", "places", "responses", "unreachable", "key", "signature")

_COUNTS = ("scanned", "survivors", "kept", "chance", "sent_again")

_COLOURS = {"clean": "green", "survivors": "red"}
_WORDS = {"clean": "clean", "survivors": "SURVIVORS", "not_proven": "not proven"}


def prove(
    *,
    session: Annotated[str, typer.Option(help="Session to forget.")],
    tenant: Annotated[
        str | None,
        typer.Option(help="Tenant of the session: asks the admin API, with LEYLINE_ADMIN_KEY."),
    ] = None,
    span: Annotated[
        list[str] | None, typer.Option(help="Name in the session's ledger; without any, all goes.")
    ] = None,
    proxy: Annotated[
        str, typer.Option(help="Base URL of the proxy; with --tenant, of its admin API.")
    ] = _PROXY,
    key_file: Annotated[
        Path | None,
        typer.Option(help="File with the key that must have signed it \\[LEYLINE_AUDIT_KEY]."),
    ] = None,
    json_out: Annotated[
        Path | None, typer.Option("--json", help="File for the proof as JSON; - for the output.")
    ] = None,
    wait: Annotated[
        float, typer.Option(min=0, max=60, help="Seconds to wait for running requests.")
    ] = 10.0,
    responses: Annotated[
        bool, typer.Option("--responses", help="Delete the session's stored responses, too.")
    ] = False,
    ca: Ca = None,
    client_cert: Cert = None,
    client_key: Key = None,
) -> None:
    """Forget a session on every engine, then look for what is left of it.

    Exits with 0 if nothing is left in any place, with 1 if something is, or if a place could not be
    looked at, and with 2 if the proxy can't be asked. The key of the tenant is in LEYLINE_API_KEY.
    """
    from ..audit.keys import audit_keys

    body = {"spans": span or [], "wait_s": wait, "responses": responses}
    begun = datetime.now(UTC)
    with usage_errors("audit prove", ValueError):
        keys, verify = audit_keys(key_file), context_of(ca, client_cert, client_key)
    # Before anything is forgotten: a proof can't be made twice.
    out = _opened(json_out) if json_out is not None else None
    try:
        proof = _ask(proxy, session, tenant, body, wait, verify=verify)
    except typer.Exit:
        _discard(out)
        raise
    asked = {"session": session, "spans": span or []} | ({"tenant": tenant} if tenant else {})
    problem = _signature_problem(proof, keys) or _other_problem(proof, asked, begun)
    if out is not None:
        _write(out, msgspec.json.format(msgspec.json.encode(proof), indent=2).decode())
    if out is not sys.stdout:
        _print(proof, problem, checked=bool(keys))
    elif problem:
        Console(stderr=True, highlight=False, soft_wrap=True).print(f"[red]{escape(problem)}[/red]")
    if proof.get("verdict") != "clean" or problem:
        raise typer.Exit(NOT_PROVEN)


def _ask(
    proxy: str,
    session: str,
    tenant: str | None,
    body: Mapping[str, Any],
    wait: float,
    *,
    verify: ssl.SSLContext | bool,
) -> dict[str, Any]:
    import os

    import httpx

    name = quote(session, safe="")
    if tenant is None:
        path, variable = f"/v1/leyline/sessions/{name}/proof", "LEYLINE_API_KEY"
    else:
        path, variable = f"/admin/proofs/{quote(tenant, safe='')}/{name}", "LEYLINE_ADMIN_KEY"
    key = os.environ.get(variable)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        answer = httpx.post(
            proxy.rstrip("/") + path,
            json=body,
            headers=headers,
            timeout=wait + _MARGIN_S,
            verify=verify,
        )
        found = msgspec.json.decode(answer.content)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        reason = tls_refusal(error) or type(error).__name__
        raise usage_error(
            "audit prove", f"the proxy at {proxy} gave no answer: {reason}"
        ) from error
    except msgspec.DecodeError as error:
        raise usage_error(
            "audit prove", f"{proxy} answered {answer.status_code}, and not as a proxy does"
        ) from error
    if answer.status_code != 200:
        raise usage_error(
            "audit prove", _message(found) or f"the proxy answered {answer.status_code}"
        )
    if not isinstance(found, dict) or not {"verdict", *_MEMBERS} <= found.keys():
        raise usage_error(
            "audit prove",
            f"{proxy} answered without a proof; is its version the same as this one's?",
        )
    return found


def _message(answer: object) -> str:
    match answer:
        case {"error": {"message": str(message)}}:
            return message
        case _:
            return ""


def _signature_problem(proof: Mapping[str, Any], keys: Sequence[AuditKey]) -> str:
    """Return what is wrong with a proof's signature; empty if there is no key to check it."""
    from ..audit.proofs import is_signed

    if not keys or any(is_signed(proof, key) for key in keys):
        return ""
    return "the signature isn't the key's" if proof.get("signature") else "the proof isn't signed"


def _other_problem(proof: Mapping[str, Any], asked: Mapping[str, Any], begun: datetime) -> str:
    """Return why a proof isn't the one that was asked for, such as an earlier one; or nothing."""
    for name, value in asked.items():
        if proof.get(name) != value:
            return f"the proof is of another {name.removesuffix('s')}"
    try:
        made = datetime.fromisoformat(str(proof.get("time")))
        early = made < begun - _SKEW
    except (ValueError, TypeError):
        return "the proof has no time"
    return "the proof was made before it was asked for" if early else ""


def _opened(path: Path) -> TextIO:
    """Open the file for the proof; what it holds stays until there is one."""
    if str(path) == "-":
        return sys.stdout
    try:
        return path.open("a", encoding="utf-8")
    except OSError as error:
        raise usage_error("audit prove", f"{path} can't be written: {error.strerror}") from error


def _write(out: TextIO, text: str) -> None:
    if out is sys.stdout:
        typer.echo(text)
        return
    try:
        with out:
            if Path(out.name).is_file():
                out.truncate(0)
            out.write(text + "\n")
    except OSError as error:
        raise usage_error(
            "audit prove", f"{out.name} can't be written: {error.strerror}"
        ) from error


def _discard(out: TextIO | None) -> None:
    """Close a file that gets no proof; one that this command made is empty, and goes."""
    if out is None or out is sys.stdout:
        return
    path = Path(out.name)
    out.close()
    if path.is_file() and not path.stat().st_size:
        path.unlink(missing_ok=True)


def _print(proof: Mapping[str, Any], problem: str, *, checked: bool) -> None:
    from rich.table import Table

    console = Console(highlight=False, soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    for name in (
        "where",
        "place",
        "scanned",
        "survivors",
        "kept by others",
        "by chance",
        "sent again",
        "",
    ):
        table.add_column(name)
    for engine in proof["engines"]:
        _rows(table, str(engine["upstream"]), engine.get("places", ()))
    _rows(table, "proxy", proof["places"])
    console.print(table)
    for engine in proof["engines"]:
        name, word = escape(str(engine["upstream"])), _WORDS.get(engine["verdict"], "?")
        rows = f", {engine['digested']} of {engine['doomed']} rows" if "doomed" in engine else ""
        why = f": {escape(engine['reason'])}" if engine.get("reason") else ""
        console.print(f"{name}: {word}{rows}{why}")
    if proof["unreachable"]:
        console.print("some text may be where no forget finds it: the conversation had no name")
    held = proof["responses"]["held"]
    if held or held is None:
        count = "an unknown number of" if held is None else str(held)
        console.print(f"{count} stored responses stay; --responses deletes them")
    if problem:
        console.print(f"[red]{problem}[/red]")
    verdict = proof["verdict"]
    colour = _COLOURS.get(verdict, "yellow")
    console.print(
        f"[{colour}]{_WORDS.get(verdict, '?')}[/{colour}], {_signed(proof, problem, checked)}"
    )


def _signed(proof: Mapping[str, Any], problem: str, checked: bool) -> str:
    if not proof["signature"]:
        return "not signed"
    if not checked:
        return "signed, not checked: --key-file names the key"
    return "not accepted" if problem else f"signed with {escape(str(proof['key']))}"


def _rows(table: Any, where: str, places: Any) -> None:
    for place in places:
        counts = (place[name] for name in _COUNTS)
        table.add_row(escape(where), place["place"], *map(str, counts), escape(place["unscanned"]))
