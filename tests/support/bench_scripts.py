"""The scripts in `bench/` that write tables of the documentation, as modules."""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

BENCH = Path(__file__).parents[2] / "bench"


@cache
def bench(name: str, *needed: str) -> ModuleType:
    """The script of a name, after those that it imports."""
    for each in needed:
        bench(each)
    found = importlib.util.spec_from_file_location(name, BENCH / f"{name}.py")
    assert found is not None and found.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module
