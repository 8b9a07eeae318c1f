"""``leyline serve``: the proxy, by default with an engine in the same process."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO, TypeVar, get_args, get_type_hints

import typer
from rich.console import Console
from rich.markup import escape
from typer.models import OptionInfo

from .banner import HeldOutput, announce, logs_after_banner, waiting

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
PANELS = {
    "Address": "host port allowed_host admin_port tls_cert tls_key",
    "Engines": "upstream router affinity_header engine engine_option model",
    "Policies": "policy policies_file fidelity_profile on_fault edit_timing request_policy",
    "Cache": (
        "splice undeclared reasoning_edits compaction_edits recurrent_edits reuse reuse_margin "
        "retained_turns warm_start_path"
    ),
    "Tenants": "api_key api_keys_file",
    "Audit log": "audit_file audit_key_file audit_turns audit_redis",
    "Operation": "config workers session_store trace log_level log_format",
}
"""Titles, and the names of parameters."""

SETTINGS = {
    "allowed_host": "allowed_hosts",
    "api_key": "api_keys",
    "engine_option": "engine_options",
    "request_policy": "allow_request_policy",
}
"""Settings of flags with another name."""


C = TypeVar("C", bound=Callable[..., Any])


def in_panels(panels: Mapping[str, str]) -> Callable[[C], C]:
    """Return a decorator that shows a command's options in panels.

    Args:
        panels: the names of parameters, separated by blanks, by their panel's title.
    """
    of = {name: title for title, names in panels.items() for name in names.split()}

    def shown(command: C) -> C:
        hints = get_type_hints(command, include_extras=True)
        for name, title in of.items():
            option = next(each for each in get_args(hints[name]) if isinstance(each, OptionInfo))
            option.rich_help_panel = title
        command.__annotations__ = hints
        return command

    return shown


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


USAGE_ERROR = 2


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command(name="serve", epilog=EPILOG)(serve)


@in_panels(PANELS)
def serve(
    *,
    host: Annotated[str | None, typer.Option(help="Address to listen on [127.0.0.1].")] = None,
    port: Annotated[
        int | None, typer.Option(help="Port to listen on; 0 takes a free port [8790].")
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME or NAME:PORT that clients may use for a proxy without keys; repeatable."
        ),
    ] = None,
    upstream: Annotated[
        list[str] | None,
        typer.Option(
            help="URL or NAME=URL of an engine; repeatable. Without it, an engine runs here."
        ),
    ] = None,
    router: Annotated[
        str | None, typer.Option(help="URL of a router in front of the engines of --upstream.")
    ] = None,
    affinity_header: Annotated[
        str | None, typer.Option(help="A further header with the session's id, for a router.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="Processes that serve the port; share everything [1].")
    ] = None,
    engine: Annotated[str | None, typer.Option(help="Embedded engine to run \\[replay].")] = None,
    engine_option: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE for the embedded engine; repeatable.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="A bundled model, a folder or a hub id \\[leyline-recall]."),
    ] = None,
    policy: Annotated[
        str | None, typer.Option(help="Policies, such as truncate_older_than:n=2,max_chars=200.")
    ] = None,
    policies_file: Annotated[
        Path | None,
        typer.Option(help="YAML file of policies by tenant and model; reloaded when it changes."),
    ] = None,
    fidelity_profile: Annotated[
        Path | None,
        typer.Option(help="JSON file of settings by model, such as a report of `leyline eval`."),
    ] = None,
    on_fault: Annotated[
        str | None,
        typer.Option(help="If a policy that forgets fails: refuse or skip \\[refuse]."),
    ] = None,
    edit_timing: Annotated[
        str | None, typer.Option(help="When edits are sent: now, auto or wait \\[auto].")
    ] = None,
    undeclared: Annotated[
        list[str] | None,
        typer.Option(help="ROLE=MODE for undeclared edits; repeatable \\[exact]."),
    ] = None,
    reasoning_edits: Annotated[
        str | None,
        typer.Option(
            help="Thinking that the chat template strips: amortize or exact \\[amortize]."
        ),
    ] = None,
    compaction_edits: Annotated[
        str | None,
        typer.Option(help="A history that gives way to a summary: amortize or exact \\[amortize]."),
    ] = None,
    recurrent_edits: Annotated[
        str | None,
        typer.Option(help="Edits on models with recurrent layers: kept or exact \\[kept]."),
    ] = None,
    request_policy: Annotated[
        bool | None,
        typer.Option(
            "--request-policy/--no-request-policy", help="Let requests choose their policy \\[yes]."
        ),
    ] = None,
    splice: Annotated[
        bool | None, typer.Option("--splice/--no-splice", help="Splice edited turns \\[yes].")
    ] = None,
    reuse: Annotated[
        str | None,
        typer.Option(help="Content cached elsewhere: off, observe (count) or live (copy) \\[off]."),
    ] = None,
    reuse_margin: Annotated[
        float | None,
        typer.Option(help="Lead of a first token, in logits, at which reuse is trusted \\[0]."),
    ] = None,
    retained_turns: Annotated[
        int | None, typer.Option(help="Turns of a session that later turns can splice from [4].")
    ] = None,
    session_store: Annotated[
        str | None,
        typer.Option(help="memory, or the URL of a Redis that proxies share \\[memory]."),
    ] = None,
    audit_file: Annotated[
        Path | None, typer.Option(help="Log edits, forgets and claims in this file.")
    ] = None,
    audit_key_file: Annotated[
        Path | None, typer.Option(help="File with the key that seals the audit log.")
    ] = None,
    audit_turns: Annotated[
        str | None, typer.Option(help="Turns in the audit log: edited or all \\[edited].")
    ] = None,
    audit_redis: Annotated[
        str | None, typer.Option(help="URL of a Redis whose stream also gets the audit log.")
    ] = None,
    warm_start_path: Annotated[
        Path | None,
        typer.Option(help="Folder of prompts for a new engine; needs LEYLINE_WARM_START_KEY."),
    ] = None,
    api_key: Annotated[
        list[str] | None, typer.Option(help="TENANT:KEY; repeatable \\[no keys, one tenant].")
    ] = None,
    api_keys_file: Annotated[Path | None, typer.Option(help="File of TENANT:KEY lines.")] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate chain, for HTTPS.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Key of --tls-cert.")] = None,
    admin_port: Annotated[
        int | None, typer.Option(help="Port of the admin API; needs LEYLINE_ADMIN_KEY \\[off].")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file of settings.")] = None,
    trace: Annotated[
        str | None, typer.Option(help="Traces: otlp (to a collector), console or off \\[off].")
    ] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning, error.")] = None,
    log_format: Annotated[str | None, typer.Option(help="auto, json or console.")] = None,
) -> None:
    """Start the proxy and print where to point your OpenAI client."""
    flags = dict(locals())
    settings = settings_of(flags)
    with ExitStack() as stack:
        held = stack.enter_context(logs_after_banner())
        if settings.workers == 1:
            _check(settings, sources_of(flags))
        # Before the engine: a model may take minutes to load.
        sock = stack.enter_context(_listen(settings.host, settings.port, "--port"))
        admin = (
            stack.enter_context(_listen(settings.admin_host, settings.admin_port, "--admin-port"))
            if settings.admin_port is not None
            else None
        )
        if settings.workers == 1:
            app = _application(settings, sources_of(flags), held.stream)
            _run(app, settings, sock, admin, held)
        else:
            _supervise(settings, sources_of(flags), sock, admin, held)


def settings_of(flags: Mapping[str, Any]) -> Settings:
    """Return the settings from flags, environment and file.

    Args:
        flags: all parameters of :func:`serve`; None means not given.

    Raises:
        typer.Exit: with 2, after printing each error, its place and its fix.
    """
    from ..settings.faults import faults_of

    try:
        return read_settings(flags)
    except (OSError, ValueError) as error:
        raise _usage("\n".join(map(str, faults_of(error, sources_of(flags))))) from error


def read_settings(
    flags: Mapping[str, Any],
    without: Collection[str] = (),
    stand_ins: Mapping[str, Any] | None = None,
) -> Settings:
    """Return the same as :func:`settings_of`, but raise the errors of ``load_settings``.

    Args:
        without: settings that no source may set.
        stand_ins: values in their places.
    """
    from ..settings import load_settings

    own = {
        "upstream": None,
        **_engines(flags["upstream"]),
        "engine_options": _engine_options(flags["engine_option"]),
    }
    given = {SETTINGS.get(name, name): value for name, value in flags.items()}
    named = {name: value for name, value in {**given, **own}.items() if name not in without}
    return load_settings(**named, **(stand_ins or {}), without=without)


def sources_of(flags: Mapping[str, Any]) -> Sources:
    """Return the sources of the settings, for reports of errors."""
    from ..settings.faults import Sources

    given = [name for name, value in flags.items() if value is not None and name != "config"]
    named = {SETTINGS.get(name, name): f"--{name.replace('_', '-')}" for name in given}
    if "upstream" in named:  # one of two settings
        flag = named.pop("upstream")
        named |= dict.fromkeys(_engines(flags["upstream"]), flag)
    return Sources(flags["config"], named, os.environ)


def _engines(items: list[str] | None) -> dict[str, Any]:
    """Return the settings of ``--upstream``: one URL, or several by name."""
    named: dict[str, str] = {}
    for item in items or ():
        name, sign, url = item.partition("=")
        if not sign or "/" in name:
            place = item.partition("://")[2].partition("/")[0]
            name, url = place.rpartition("@")[2], item  # without credentials
        if name in named:
            raise _usage(
                f"--upstream {name} is given twice; give each engine its own name with NAME=URL"
            )
        named[name] = url
    if len(named) == 1 and items == list(named.values()):
        return {"upstream": items[0]}
    return {"upstreams": named or None}


def _engine_options(items: list[str] | None) -> dict[str, Any] | None:
    import yaml

    if not items:
        return None
    options: dict[str, Any] = {}
    for item in items:
        name, sign, value = item.partition("=")
        if not sign:
            # Not quoted: it may be a secret whose name was forgotten.
            raise _usage("--engine-option must be NAME=VALUE")
        try:
            options[name.replace("-", "_")] = yaml.safe_load(value)
        except (yaml.YAMLError, ValueError) as error:
            raise _usage(f"the value of --engine-option {name} isn't YAML; quote it") from error
    return options


@contextmanager
def _faults(sources: Sources) -> Iterator[None]:
    """End the command for an error of the start, with its place and its fix."""
    from leyline_policies import PolicyError

    from ..settings.faults import fault_of_start

    try:
        yield
    except (PolicyError, ValueError) as error:
        raise _usage(str(fault_of_start(error, sources))) from error


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
    try:
        with waiting(f"Loading the {settings.engine} engine", terminal):
            return create_embedded_engine(settings.engine, options)
    except EngineUnavailable as error:
        raise _usage(str(error)) from error


def _listen(host: str, port: int, flag: str) -> socket.socket:
    try:
        return listen(host, port, flag)
    except ListenError as error:
        raise _usage(str(error)) from error


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
        try:
            status = supervise(settings, sock, admin, folder, up)
        except AuditError as error:
            raise _usage(str(error)) from error
    if status:
        raise typer.Exit(status)


def _usage(message: str) -> typer.Exit:
    Console(stderr=True, highlight=False, soft_wrap=True).print(
        f"[red]leyline serve:[/red] {escape(message)}"
    )
    return typer.Exit(USAGE_ERROR)
