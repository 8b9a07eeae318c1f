"""The flags of a measurement."""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path


class Arguments(ArgumentParser):
    """Flags that begin with those of nearly every measurement.

    Args:
        document: docstring of the module; its first paragraph is the description.
        json: False for a measurement without ``--json``.
        required: True if ``--json`` must be given.
        plot: True for ``--plot``.
    """

    def __init__(
        self, document: str | None, *, json: bool = True, required: bool = False, plot: bool = False
    ) -> None:
        super().__init__(description=(document or "").partition("\n\n")[0])
        if json:
            self.add_argument(
                "--json", type=Path, required=required, metavar="OUT", help="write the figures here"
            )
        if plot:
            self.add_argument(
                "--plot", type=Path, metavar="OUT", help="draw them: .png, .svg or .pdf"
            )


def words(text: str) -> list[str]:
    """Return the words of a list with commas."""
    return text.split(",")


def numbers(text: str) -> list[int]:
    """Return the numbers of a list with commas."""
    return [int(word) for word in words(text)]
