"""The program that sends a request, by its own word."""

from __future__ import annotations

import re
from collections.abc import Mapping

MAX_NAME = 48

_PRODUCT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+/-]*")


def client_name(headers: Mapping[str, str]) -> str:
    """Return the first product of ``User-Agent`` (RFC 9110, section 10.1.5); empty for none.

    Args:
        headers: with lower-case names.
    """
    found = _PRODUCT.match(headers.get("user-agent", ""))
    return found[0][:MAX_NAME] if found is not None else ""
