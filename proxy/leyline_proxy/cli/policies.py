"""``leyline policies``: lists, explains, tries and writes policies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from .laboratory import POLICY_COMMANDS, register_commands
from .output import usage_errors


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
    from leyline_policies import Registry

    from .policy_catalogue import catalogue_table

    console = Console()
    console.print(catalogue_table(Registry.discover(), width=console.width))
    console.print("More about one: leyline policies show NAME", style="dim", highlight=False)


def show(
    name: Annotated[str, typer.Argument(metavar="NAME", help="As leyline policies list shows it.")],
) -> None:
    """Explain one policy: what it does, its settings, and specs to copy."""
    from leyline_policies import PolicyError, Registry

    from .policy_catalogue import print_policy

    with usage_errors("policies show", PolicyError):
        registry = Registry.discover()
        print_policy(Console(), registry.get(name), registry)


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
    from leyline_policies import Registry

    from .policy_scaffold import ScaffoldError, write_package

    with usage_errors("policies new", ScaffoldError):
        folder = write_package(name, parent.expanduser(), Registry.discover())
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
