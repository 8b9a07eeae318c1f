"""``leyline keys``: API keys and the lines of a key file."""

from __future__ import annotations

import secrets
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .output import usage_error, usage_errors

if TYPE_CHECKING:
    from ..settings.api_keys import ApiKey

_KEY_BYTES = 32

_HELP = """Make API keys, and manage the file that --api-keys-file names.

The file has one key per line, TENANT:sha256:HEX or TENANT:KEY, optionally followed by expires=TIME.
A tenant may have several keys. To rotate a key, add the new line, move the clients, and remove the
old line. A running proxy reads the file again within a second.
"""

Expires = Annotated[
    str | None, typer.Option(help="ISO date or time from which the key is no longer valid.")
]


def register(app: typer.Typer) -> None:
    """Add the group to ``app``."""
    keys = typer.Typer(no_args_is_help=True, help=_HELP, rich_markup_mode="rich")
    keys.command(name="new", epilog="Example:  leyline keys new red >> keys")(new)
    keys.command(name="hash", epilog="Example:  leyline keys hash red < key >> keys")(hash_key)
    keys.command(name="list", epilog="Example:  leyline keys list keys")(list_keys)
    app.add_typer(keys, name="keys")


def new(
    tenant: Annotated[str, typer.Argument(help="Tenant that the key is for.")],
    expires: Expires = None,
) -> None:
    """Make a random key of 256 bits. The key goes to stderr, its line for the file to stdout."""
    from ..settings.api_keys import PREFIX

    key = PREFIX + secrets.token_urlsafe(_KEY_BYTES)
    line = _line(tenant, key, expires)
    Console(stderr=True, highlight=False, soft_wrap=True).print(
        f"Key of {escape(tenant)}, shown this once: [bold]{key}[/bold]"
    )
    typer.echo(line)


def hash_key(
    tenant: Annotated[str, typer.Argument(help="Tenant that the key is for.")],
    expires: Expires = None,
) -> None:
    """Print the line of the file for a key that you have, from stdin or a prompt."""
    # Not an argument: those are visible in the shell's history and the list of processes.
    key = typer.prompt("Key", hide_input=True, err=True) if sys.stdin.isatty() else sys.stdin.read()
    stripped = key.strip()
    if not stripped or len(stripped.split()) > 1:
        raise usage_error("keys", "a key is one word")
    typer.echo(_line(tenant, stripped, expires))


def list_keys(
    file: Annotated[Path, typer.Argument(help="A key file.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the tenants, ids and expiries of the keys in a file, never the keys themselves.

    Exits with 2 when the file is wrong, and names the line.
    """
    from ..settings.api_keys import KeyLineError, expiry_text, parse_keys

    try:
        keys = parse_keys(file.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise usage_error("keys", f"{file} can't be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise usage_error("keys", f"{file} isn't UTF-8 text") from error
    except KeyLineError as error:
        raise usage_error("keys", f"{file}, {error}") from error
    now = time.time()
    if as_json:
        typer.echo(msgspec.json.encode([_document(key, now) for key in keys]).decode())
        return
    table = Table("tenant", "id", "expires", box=None)
    for key in keys:
        ending = "never" if key.expires is None else expiry_text(key.expires)
        shown = ending if key.valid(now) else f"[red]{ending} (expired)[/red]"
        table.add_row(escape(key.tenant), key.id, shown)
    Console().print(table)


def _line(tenant: str, key: str, expires: str | None) -> str:
    from ..settings.api_keys import (
        ApiKey,
        KeyLineError,
        check_tenant,
        key_digest,
        key_line,
        parse_expiry,
    )

    with usage_errors("keys", KeyLineError):
        ends = None if expires is None else parse_expiry(expires)
        return key_line(ApiKey(check_tenant(tenant), key_digest(key), ends))


def _document(key: ApiKey, now: float) -> dict[str, str | bool | None]:
    from ..settings.api_keys import expiry_text

    return {
        "tenant": key.tenant,
        "id": key.id,
        "expires": None if key.expires is None else expiry_text(key.expires),
        "valid": key.valid(now),
    }
