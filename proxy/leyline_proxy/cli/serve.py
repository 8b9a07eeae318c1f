"""``leyline serve``: the proxy, by default with an engine in the same process."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, TextIO

import typer

from .banner import HeldOutput, announce, logs_after_banner, waiting
from .flags import read_settings, sources_of, with_flags
from .output import usage_error, usage_errors

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.applications import Starlette

    from ..settings import Settings
    from ..settings.faults import Sources

EPILOG = """[bold]Examples[/bold]

Try it, no GPU needed:  leyline serve

In front of SGLang:  leyline serve --upstream http://gpu1:30000

In front of several engines:

leyline serve --upstream a=http://gpu1:30000 --upstream b=http://gpu2:30000

Shorten old tool output:

leyline serve --policy "truncate_older_than:n=2,max_chars=200"

A harness truncates its history:  leyline serve --undeclared tool=amortize

Two teams:  leyline serve --api-key red:KEY1 --api-key blue:KEY2

Every flag is also a setting LEYLINE_NAME in the environment and a key in the file of --config.
Flags override the environment, and the environment overrides the file.
"""


class ListenError(Exception):
    """A socket can't listen where it should; the text names the fix."""


def listen(host: str, port: int, flag: str) -> socket.socket:
    """Return a socket that is bound to an address.

    Args:
        flag: the setting of the port: ``--port`` or ``--admin-port``.

    Raises:
        ListenError: the address is taken, or isn't this machine's, or a name that nobody knows.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        why = f"Can't listen on {place} ({error.strerror})."
        raise ListenError(f"{why} {_fix(error, host, port, flag)}") from error
    return sock


def _fix(error: OSError, host: str, port: int, flag: str) -> str:
    host_flag = flag.replace("port", "host")
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return (
            f"{host} is no address of this machine. {host_flag} 0.0.0.0 takes all of its "
            f"addresses, {host_flag} 127.0.0.1 calls from this machine alone."
        )
    if error.errno == errno.EADDRINUSE:
        return (
            f"Another program listens there, maybe another proxy: stop it (ss -ltnp shows it), "
            f"or take another port: {flag} {port + 1 if port < 65535 else 8790}, or {flag} 0 for a "
            "free one."
        )
    if error.errno == errno.EACCES:
        return f"Ports below 1024 need a privilege. {flag} 8790 needs none."
    return f"{flag} 0 takes a free port."


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command(name="serve", epilog=EPILOG)(serve)


@with_flags
def serve(*, flags: Mapping[str, Any]) -> None:
    """Start the proxy and print where to point your OpenAI client."""
    from ..settings.faults import faults_of

    sources = sources_of(flags)
    try:
        settings = read_settings(flags)
    except (OSError, ValueError) as error:
        raise usage_error("serve", "\n".join(map(str, faults_of(error, sources)))) from error
    with ExitStack() as stack:
        held = stack.enter_context(logs_after_banner())
        if settings.workers == 1:
            _check(settings, sources)
        # Before the engine: a model may take minutes to load.
        with usage_errors("serve", ListenError):
            sock = stack.enter_context(listen(settings.host, settings.port, "--port"))
            admin = None
            if settings.admin_port is not None:
                admin = listen(settings.admin_host, settings.admin_port, "--admin-port")
                stack.enter_context(admin)
        if settings.workers == 1:
            app = _application(settings, sources, held.stream)
            _run(app, settings, sock, admin, held)
        else:
            _supervise(settings, sources, sock, admin, held)


@contextmanager
def _faults(sources: Sources) -> Iterator[None]:
    """End the command for an error of the start, with its place and its fix."""
    from leyline_policies import PolicyError

    from ..settings.faults import fault_of_start

    try:
        yield
    except (PolicyError, ValueError) as error:
        raise usage_error("serve", str(fault_of_start(error, sources))) from error


def _check(settings: Settings, sources: Sources) -> None:
    """End the command for settings with which a proxy can't start."""
    _log(settings)
    with _faults(sources):
        from ..wiring.starting import check_start

        check_start(settings)


def _application(settings: Settings, sources: Sources, terminal: TextIO) -> FastAPI:
    with _faults(sources):
        # FastAPI loads what OTEL_PROPAGATORS names, and fails if that is unknown.
        from ..http.app import create_app

        app = create_app(settings, engine_app=_engine(settings, terminal))
        app.state.services.audit.claim()  # reports a file of another proxy
    return app


def _log(settings: Settings) -> None:
    import structlog

    from ..settings.faults import ignored_variables
    from ..telemetry.logging import configure_logging

    configure_logging(settings.log_level, settings.log_format)
    for fault in ignored_variables(os.environ):
        structlog.get_logger("leyline.settings").warning(
            "variable_ignored", variable=fault.place, problem=fault.problem, fix=fault.fix
        )


def _engine(settings: Settings, terminal: TextIO) -> Starlette | None:
    from ..upstream.embedded import EngineUnavailable, create_embedded_engine

    if settings.engines():
        return None
    options = dict(settings.engine_options)
    if settings.model is not None:
        options["model"] = settings.model
    with (
        usage_errors("serve", EngineUnavailable),
        waiting(f"Loading the {settings.engine} engine", terminal),
    ):
        return create_embedded_engine(settings.engine, options)


def _run(
    app: FastAPI,
    settings: Settings,
    sock: socket.socket,
    admin: socket.socket | None,
    held: HeldOutput,
) -> None:
    from ..http.server import listening
    from ..workers.serving import banner_of, ignore_repeated_signals, server_of

    def started() -> None:
        announce(banner_of(app.state.services), sock, admin, settings, held)

    ignore_repeated_signals()
    server_of(
        app,
        settings,
        door=listening(sock),
        admin=listening(admin) if admin is not None else None,
        started=started,
    ).run(sockets=[])


def _supervise(
    settings: Settings,
    sources: Sources,
    sock: socket.socket,
    admin: socket.socket | None,
    held: HeldOutput,
) -> None:
    from ..workers.folder import own_folder

    def up(facts: Mapping[str, str]) -> None:
        announce(facts, sock, admin, settings, held)

    _log(settings)
    with own_folder() as folder:
        from ..audit.files import AuditError
        from ..wiring.starting import check_start
        from ..workers.supervisor import supervise  # reads what own_folder sets

        with _faults(sources):
            check_start(settings)
        with usage_errors("serve", AuditError):
            status = supervise(settings, sock, admin, folder, up)
    if status:
        raise typer.Exit(status)
