"""docs/models.md: generated from the verdicts, and as good as it says."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "deploy" / "docs"))

import models_page


def test_the_page_is_the_generator_s() -> None:
    """The committed page is what the committed verdicts give."""
    assert models_page.PAGE.read_text(encoding="utf-8") == models_page.page()


def test_a_third_of_the_cookbook_splices() -> None:
    """At least 24 pages of the cookbook, each measured, and nine in ten of their recipes."""
    spliced = [entry for entry in models_page.entries() if entry.splices]
    assert len(spliced) >= 24
    assert all(entry.measured for entry in spliced)
    recipes = sum(len(entry.recipes) for entry in spliced)
    assert sum(entry.spliced_recipes for entry in spliced) >= 0.9 * recipes


def test_what_does_not_splice_says_why() -> None:
    """No page is without a verdict or a reason."""
    for entry in models_page.entries():
        assert bool(entry.reason) is not entry.splices, entry.page
