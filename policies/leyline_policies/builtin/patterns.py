"""Regular expressions from settings."""

from __future__ import annotations

import re

from leyline_policies.errors import shown


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Compile a setting's regular expression.

    Raises ValueError that says what is wrong with it and where.
    """
    if not pattern:
        raise ValueError("pattern is empty; it would match everywhere")
    try:
        return re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"pattern={shown(pattern)} is no regular expression: {error}") from error
