"""``leyline policies``: lists, explains, tries and writes policies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from .laboratory import POLICY_COMMANDS, register_commands


def register(app: typer.Typer) -> None:
    """Add the group."""
    group = typer.Typer(
        no_args_is_help=True,
        rich_markup_mode="rich",
        help="List, explain, try and write policies, which edit an agent's history.",
        epilog=(
            "Start here:  leyline policies list\n\n"
            "Example:  leyline policies try truncate_older_than:n=4 session.jsonl"
        ),
    )
    group.command("list")(list_policies)
    group.command("show", epilog="Example:  leyline policies show truncate_older_than")(show)
    register_commands(group, POLICY_COMMANDS)
    group.command("new", epilog="Example:  leyline policies new short_pastes --dir ~/code")(new)
    group.command(
        "schema", epilog="Example:  leyline policies schema > leyline-policies.schema.json"
    )(schema)
    app.add_typer(group, name="policies")


def list_policies() -> None:
    """List the policies that you can choose by name, built-in and installed.

    A broken plugin is listed with its error.
    """
    from rich.console import Console

    from leyline_policies import Registry

    from .policy_catalogue import catalogue_table

    console = Console()
    console.print(catalogue_table(Registry.discover(), width=console.width))
    console.print("More about one: leyline policies show NAME", style="dim", highlight=False)


def show(
    name: Annotated[str, typer.Argument(metavar="NAME", help="As leyline policies list shows it.")],
) -> None:
    """Explain one policy: what it does, its settings, and specs to copy."""
    from rich.console import Console

    from leyline_policies import PolicyError, Registry

    from .policy_catalogue import print_policy

    try:
        registry = Registry.discover()
        print_policy(Console(), registry.get(name), registry)
    except PolicyError as error:
        _fail("show", error)


def new(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Name of the policy, such as short_pastes.")
    ],
    *,
    parent: Annotated[
        Path, typer.Option("--dir", metavar="DIR", help="Folder in which to make the package.")
    ] = Path(),
) -> None:
    """Write a package with a policy, tests and a README, ready to install.

    The package registers the policy as an entry point, so that a Leyline in the same
    environment can choose it by name. Existing files are never overwritten.
    """
    from rich.console import Console

    from leyline_policies import Registry

    from .policy_scaffold import ScaffoldError, write_package

    try:
        folder = write_package(name, parent.expanduser(), Registry.discover())
    except ScaffoldError as error:
        _fail("new", error)
    console = Console(highlight=False)
    console.print(f"Wrote {folder}. Next:", markup=False)
    for line in (
        f"cd {folder}",
        "pip install -e '.[test]' && pytest",
        f"leyline policies show {name}",
    ):
        console.print(f"  {line}", markup=False, soft_wrap=True)


def schema() -> None:
    """Print the JSON Schema of a policies file, for editors and for checks before a rollout.

    It includes the settings of every policy that is installed here.
    """
    from leyline_policies import Registry
    from leyline_policies.schema import policy_schema

    typer.echo(json.dumps(policy_schema(Registry.discover()), indent=2))


def _fail(command: str, error: Exception) -> NoReturn:
    from rich.console import Console

    text = f"leyline policies {command}: {error}"
    Console(stderr=True).print(text, style="red", markup=False, highlight=False)
    raise typer.Exit(2) from error
