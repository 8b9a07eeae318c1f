"""Panels of a command's help: options by topic."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, get_args, get_type_hints

from typer.models import OptionInfo

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
