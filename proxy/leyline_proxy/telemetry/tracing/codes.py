"""Error codes as attributes of spans."""

from __future__ import annotations

import re

_PLAIN_CODE = re.compile(r"[A-Za-z0-9_.:-]{1,64}")


def plain_code(code: str) -> str:
    """Return an error's code if it is plain; engines may write anything there."""
    return code if _PLAIN_CODE.fullmatch(code) else "other"
