"""The lines that ``leyline serve`` prints once it is up."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

if TYPE_CHECKING:
    from ..settings import Settings


def announce(
    facts: Mapping[str, str], sock: socket.socket, admin: socket.socket | None, settings: Settings
) -> None:
    """Print where to point a client, and facts about the engine.

    Args:
        facts: of :func:`~leyline_proxy.workers.serving.banner_of`.
        sock: the proxy's port.
        admin: the admin port, if there is one.
    """
    from ..workers.serving import url_of

    secure = settings.tls_cert is not None
    console = Console(highlight=False, soft_wrap=True)
    verdict = facts["splices"]
    word, colon, obstacle = verdict.partition(":")
    color = "green" if verdict == "yes" else "red"
    shown = {name: escape(fact) for name, fact in facts.items()}
    shown["splices"] = f"[{color}]{word}[/{color}]{colon}{escape(obstacle)}"
    url = url_of(sock, secure=secure)
    lines = {"base_url": f"{url}/v1", **shown, "live page": f"{url}/"}
    if admin is not None:
        lines["admin"] = f"{url_of(admin, secure=secure)}/admin"
    console.print("[bold]Leyline is up.[/bold]")
    for name, value in lines.items():
        console.print(f"  {name:<12} {value}")
