"""The patterns and lists that the policies of one request may bring."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from leyline_policies.builtin.patterns import linear_size

MAX_PATTERNS = 16
MAX_PARTS = 4_000
"""Maximum number of parts of all patterns of a spec, with repetitions written out."""
MAX_ITEMS = 64
"""Maximum number of items in a list: some are looked through for every message."""
MAX_TRIGGER = 500
"""Maximum length of a trigger: each of its conditions may read a whole message."""


class Allowance:
    """Checks the settings of one spec: its patterns are matched in linear time, not many, and small
    together; its lists are short."""

    def __init__(self) -> None:
        self._count = 0
        self._parts = 0

    def check(self, key: str, setting: object) -> None:
        """Raise ValueError for a list or a trigger that is too long."""
        if key == "when" and isinstance(setting, str) and len(setting) > MAX_TRIGGER:
            raise ValueError(f"a trigger of a request has at most {MAX_TRIGGER} characters")
        if isinstance(setting, str):
            return
        if isinstance(setting, Collection) and len(setting) > MAX_ITEMS:
            raise ValueError(f"a list of a request has at most {MAX_ITEMS} items")

    def take(self, patterns: Iterable[str]) -> None:
        """Count more patterns.

        Raises:
            ValueError: one isn't matched in linear time, or they are too many or too large.
        """
        for pattern in patterns:
            self._count += 1
            if self._count > MAX_PATTERNS:
                raise ValueError(f"a request has at most {MAX_PATTERNS} patterns")
            self._parts += linear_size(pattern)
            if self._parts > MAX_PARTS:
                raise ValueError(
                    f"a request's patterns have at most {MAX_PARTS} parts, repetitions written out"
                )
