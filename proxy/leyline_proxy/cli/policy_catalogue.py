"""Policies for readers: a table of all, and a full description of one."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from leyline_policies import PluginError, PolicyDefinition, PolicyError, Registry
from leyline_policies.grammar import Step, value_of, write_steps
from leyline_policies.kinds import POLICIES
from leyline_policies.modifiers import MODIFIERS
from leyline_policies.parameters import Parameter
from leyline_policies.policy import MODES, FunctionPolicy
from leyline_policies.registry import BUILT_IN
from leyline_policies.spec import build_policy

_TEXT = "example"
_NUMBER = 60_000
_POLICIES = ["truncate_older_than:n=4", "sliding_window"]
_WIDE = 100


def catalogue_table(registry: Registry, *, width: int) -> Table:
    """Return every name with mode, origin, parameters and summary; broken ones with their error.

    Args:
        width: of the terminal; if it is small, the parameters are left out.
    """
    table = _table()
    table.add_column("policy", no_wrap=True)
    table.add_column("mode", no_wrap=True)
    table.add_column("what it does", ratio=3)
    if width >= _WIDE:
        table.add_column("parameters (defaults)", ratio=2, overflow="fold")
    table.add_column("from", ratio=1)
    for name in registry.names():
        try:
            definition = registry.get(name)
        except PluginError as error:
            table.add_row(escape(name), "[red]broken[/red]", f"[red]{escape(str(error))}[/red]")
            continue
        row = [name, mode_of(definition), definition.summary.replace("``", "")]
        if width >= _WIDE:
            row.append(", ".join(map(_short, definition.parameters)))
        row.append("built in" if definition.origin == BUILT_IN else definition.origin)
        table.add_row(*map(escape, row))
    return table


def print_policy(console: Console, definition: PolicyDefinition, registry: Registry) -> None:
    """Print the full description of one policy."""
    console.print(f"[bold]{escape(definition.name)}[/bold]  mode {mode_of(definition)}")
    console.print(definition.origin, style="dim", markup=False, highlight=False)
    console.print()
    console.print(_reflowed(doc_of(definition)), markup=False, highlight=False)
    console.print()
    if definition.parameters:
        console.print(_parameters("its settings", definition.parameters))
    console.print(_parameters("settings of every policy", MODIFIERS))
    console.print("examples", style="bold")
    for spec in examples(definition, registry):
        console.print(f"  {spec}", markup=False, highlight=False, soft_wrap=True)


def mode_of(definition: PolicyDefinition) -> str:
    """Return the mode of a policy's edits if it is the same for all settings."""
    policy = definition.build
    bound = getattr(policy, "__self__", None)
    mode = getattr(bound if isinstance(bound, FunctionPolicy) else policy, "mode", None)
    if mode not in MODES:
        try:
            mode = definition.create({}).mode
        except PolicyError:
            return "depends"
    return str(mode)


def doc_of(definition: PolicyDefinition) -> str:
    """Return the author's description of the policy."""
    bound = getattr(definition.build, "__self__", None)
    documented = bound.function if isinstance(bound, FunctionPolicy) else definition.build
    return inspect.getdoc(documented) or "Its author says nothing of it."


def _reflowed(text: str) -> str:
    """Return the paragraphs of a docstring without line ends, except in lists and indented text."""
    lines: list[str] = []
    for line in text.replace("``", "").splitlines():
        starts = not line or line.startswith((" ", "- ", "* ")) or not lines or not lines[-1]
        lines[len(lines) if starts else -1 :] = [line if starts else f"{lines[-1]} {line}"]
    return "\n".join(lines)


def examples(definition: PolicyDefinition, registry: Registry) -> list[str]:
    """Return specs to copy; each can be loaded, unless the policy needs settings that can't be
    guessed."""
    found: list[str] = []
    needed = _needed(definition, registry)
    if needed is None:
        values = [f"{each.name}=VALUE" for each in definition.parameters if each.required]
        return [f"{definition.name}:{','.join(values)}" if values else definition.name]
    given = [
        (each.name, each.default)
        for each in definition.parameters
        if not each.required and each.default not in (None, (), "") and each.name not in needed
    ]
    for settings in (
        needed,
        {**needed, **dict(given[:3])},
        {**needed, "when": "tokens > 60000", "protect_last": 4},
    ):
        spec = _spec(definition.name, settings)
        if spec not in found and _builds(definition.name, settings, registry):
            found.append(spec)
    return found


def _needed(definition: PolicyDefinition, registry: Registry) -> dict[str, object] | None:
    """Return the fewest settings that the policy can be built with; None if not found."""
    required = {each.name: _example(each) for each in definition.parameters if each.required}
    for settings in _candidates(definition.parameters, required):
        if _builds(definition.name, settings, registry):
            return settings
    return None


def _candidates(
    parameters: Sequence[Parameter], required: dict[str, object]
) -> Iterator[dict[str, object]]:
    yield dict(required)
    for each in parameters:
        if not each.required:
            yield {**required, each.name: _example(each)}


def _example(parameter: Parameter) -> object:
    """Return a value of a parameter that may be one that the policy takes."""
    if parameter.type is POLICIES:
        return _POLICIES
    return _NUMBER if parameter.type.schema == {"type": "integer"} else _TEXT


def _builds(name: str, settings: dict[str, object], registry: Registry) -> bool:
    try:
        build_policy(name, settings.items(), registry)
    except PolicyError:
        return False
    return True


def _spec(name: str, settings: dict[str, object]) -> str:
    return write_steps([Step(name, tuple((key, value_of(v)) for key, v in settings.items()))])


def _parameters(title: str, parameters: Sequence[Parameter]) -> Table:
    table = _table(title)
    table.add_column("setting", no_wrap=True)
    table.add_column("type")
    table.add_column("default")
    if any(each.help for each in parameters):
        table.add_column("what it is for")
    for each in parameters:
        kind = f"{each.kind}, or none" if each.optional else each.kind
        row = [each.name, kind, "needed" if each.required else _written(each.default)]
        table.add_row(*map(escape, [*row, each.help][: len(table.columns)]))
    return table


def _short(parameter: Parameter) -> str:
    return (
        parameter.name
        if parameter.required
        else f"{parameter.name} ({_written(parameter.default)})"
    )


def _written(default: object) -> str:
    """Return a default in the form of a spec."""
    return _spec("x", {"x": default}).removeprefix("x:x=")


def _table(title: str | None = None) -> Table:
    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
