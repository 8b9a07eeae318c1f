"""Functions of SGLang that this process is to replace by others."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

Replacements = Mapping[str, Mapping[str, Callable[..., Any]]]
"""By module, by the name in it."""


def replace(replacements: Replacements) -> None:
    """Replace functions, also where a module has imported them by name before."""
    for name, functions in replacements.items():
        module = import_module(name)
        for function, replacement in functions.items():
            original = getattr(module, function)
            for loaded in list(sys.modules.values()):
                if getattr(loaded, "__dict__", {}).get(function) is original:
                    setattr(loaded, function, replacement)
