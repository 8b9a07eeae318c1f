"""The words of the soaks, and the end of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

from rich.console import Console

from ..console import write_json

_WORDS = ("cache", "span", "claim", "prefix", "slot", "token", "radix", "turn", "edit", "pool")


def text(rng: Random, words: int) -> str:
    """Return random words."""
    return " ".join(rng.choices(_WORDS, k=words))


def report(out: Path | None, result: Mapping[str, Any], *, passed: bool) -> int:
    """Print and write the figures of a run; returns the exit status."""
    Console().print_json(data=result)
    write_json(out, result)
    return 0 if passed else 1
