"""An agent that repairs programs: its tool, and texts in words of their own."""

from __future__ import annotations

import random

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "read",
            "description": "Reads a file.",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
        },
    }
]


def words(seed: int, lines: int) -> str:
    """A text that no other has a passage of."""
    rng = random.Random(seed)
    return "\n".join(
        " ".join("".join(rng.choices("aeilmnorst", k=5)) for _ in range(8)) + "."
        for _ in range(lines)
    )


SUMMARY = "The agent repaired these:\n" + words(1, 12)
SYSTEM = {"role": "system", "content": "You repair programs.\n" + words(2, 20)}
