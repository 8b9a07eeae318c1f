"""The package needs nothing but the standard library, and RE2 for patterns."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

LISTING = (
    "import json, sys; before = set(sys.modules); import leyline_policies; {use}; "
    "print(json.dumps(sorted(set(sys.modules) - before)))"
)


@pytest.mark.parametrize(
    ("use", "needed"),
    [
        ("pass", set()),
        ("leyline_policies.load_pipeline('truncate_older_than:n=1 | loop_guard')", set()),
        ("leyline_policies.load_pipeline('redact:pattern=x')", {"re2"}),
    ],
)
def test_only_the_standard_library_is_imported(use: str, needed: set[str]) -> None:
    """Importing the package, or loading built-in policies, imports no other third-party module."""
    output = subprocess.run(
        [sys.executable, "-c", LISTING.format(use=use)], capture_output=True, text=True, check=True
    )
    roots = {name.partition(".")[0] for name in json.loads(output.stdout)}
    assert "leyline_policies" in roots
    assert roots - sys.stdlib_module_names == {"leyline_policies"} | needed


def test_plain_import_leaves_heavy_modules_out() -> None:
    """Package metadata, mail parsing and asyncio are not loaded by the import alone."""
    output = subprocess.run(
        [sys.executable, "-c", LISTING.format(use="pass")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert not {"importlib.metadata", "email", "asyncio", "zipfile"} & set(
        json.loads(output.stdout)
    )
