"""The number of examples a property is tried on, by the profile that the tests run under."""

from __future__ import annotations

import hypothesis

_DEFAULT = 100
"""Hypothesis's own number, which the numbers in the tests are relative to."""


def examples(number: int) -> int:
    """``number`` as it would be by default; fewer with ``CI=true``, more in nightly runs."""
    return max(1, round(number * hypothesis.settings.default.max_examples / _DEFAULT))


def is_nightly() -> bool:
    """Return True for the nightly profile, where tests take their time."""
    return hypothesis.settings.default.max_examples > 1000
