"""Measurements of content reuse: ``python -m leyline_lab.reuse NAME --json OUT``."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from pathlib import Path

from ..console import write_json

MEASUREMENTS = ("index", "margin", "matching", "named", "offline", "tenants")
"""Modules that have ``add_options(parser)``, and ``run(options)``, which returns the document."""


def main(arguments: list[str]) -> None:
    """Run a measurement, and write its figures."""
    chooser = argparse.ArgumentParser(prog="python -m leyline_lab.reuse", description=__doc__)
    chooser.add_argument("name", choices=MEASUREMENTS)
    chooser.add_argument("options", nargs=argparse.REMAINDER, help="NAME --help lists them")
    chosen = chooser.parse_args(arguments)
    module = import_module(f".{chosen.name}", __package__)
    parser = argparse.ArgumentParser(
        prog=f"{chooser.prog} {chosen.name}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the figures")
    module.add_options(parser)
    options = parser.parse_args(chosen.options)
    write_json(options.json, module.run(options))


if __name__ == "__main__":
    main(sys.argv[1:])
