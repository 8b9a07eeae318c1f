"""The command's frame; each subcommand registers itself."""

from __future__ import annotations

from importlib.metadata import version

import typer

from ..installing import PACKAGE, command_for
from . import audit, doctor, keys, policies, serve
from .laboratory import COMMANDS, register_commands

_HELP = """An OpenAI-compatible proxy that keeps the KV cache when agents edit their history.

Start with [bold]leyline serve[/bold] and point your OpenAI client's base_url at the address that
it prints. You need no GPU and no engine: without --upstream, a small engine runs in the process.
"""
_EPILOG = """Examples:

leyline serve

leyline serve --upstream http://gpu1:30000 --policy truncate_older_than:n=2

leyline doctor http://gpu1:30000
"""


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(version(PACKAGE))
        raise typer.Exit


def build_app() -> typer.Typer:
    """Return the whole command."""
    app = typer.Typer(
        name="leyline",
        help=_HELP,
        epilog=_EPILOG,
        no_args_is_help=True,
        rich_markup_mode="rich",
        # Local variables in a traceback could be prompts or keys.
        pretty_exceptions_show_locals=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @app.callback()
    def root(
        _version: bool = typer.Option(
            False,
            "--version",
            help="Print the version and exit.",
            is_eager=True,
            callback=_print_version,
        ),
    ) -> None:
        """Hold the options of the command itself; its help is the application's."""

    serve.register(app)
    doctor.register(app)
    policies.register(app)
    register_commands(app, COMMANDS)
    for module in (audit, keys):
        module.register(app)
    return app


def main() -> None:
    """Run the command; end with 2 and the fix where a package that it can name is missing."""
    try:
        build_app()()
    except ModuleNotFoundError as error:
        command = command_for(error.name or "")
        if command is None:
            raise
        problem = f"the package {error.name!r} is missing. Install it with: {command}"
        typer.echo(f"leyline: {problem}", err=True)
        raise SystemExit(2) from error
