"""docs/models.md: generated from the verdicts, and as good as it says."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "deploy" / "docs"))

import models_page


def test_the_page_is_the_generator_s() -> None:
    """The committed page is what the committed verdicts give."""
    assert models_page.PAGE.read_text(encoding="utf-8") == models_page.page()


def test_three_quarters_of_the_cookbook_splice() -> None:
    """At least 59 pages, each measured, and nine in ten recipes of models without state."""
    spliced = [entry for entry in models_page.entries() if entry.splices]
    assert len(spliced) >= 59
    assert all(entry.measured for entry in spliced)
    plain = [entry for entry in spliced if not entry.state]
    recipes = sum(len(entry.recipes) for entry in plain)
    assert sum(entry.spliced_recipes for entry in plain) >= 0.9 * recipes


def test_recipes_count_by_the_state_beside_them() -> None:
    """Speculative decoding is refused beside recurrent layers, and isn't without."""
    recipe = {"pages": [1], "speculative": "EAGLE"}
    assert not models_page.recipe_refusal(recipe)
    assert "recurrent layers" in models_page.recipe_refusal(recipe, recurrent=True)


def test_tests_of_servers_are_there() -> None:
    """Each class whose splices are said to be shown by a server names a test that exists."""
    tests = models_page.REPOSITORY / "tests" / "sglang"
    assert all((tests / test).is_file() for test in models_page.SERVERS.values())


def test_what_does_not_splice_says_why() -> None:
    """No page is without a verdict or a reason."""
    for entry in models_page.entries():
        assert bool(entry.reason) is not entry.splices, entry.page
