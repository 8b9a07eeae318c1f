"""Reading event streams."""

from __future__ import annotations

import json
from typing import Any


def sse(text: str) -> list[Any]:
    """The decoded events of a stream without names; ``[DONE]`` stays a string."""
    assert text.endswith("\n\n")
    payloads = [event.removeprefix("data: ") for event in text.split("\n\n") if event]
    return [data if data == "[DONE]" else json.loads(data) for data in payloads]
