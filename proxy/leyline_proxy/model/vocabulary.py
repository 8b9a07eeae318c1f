"""Names of results and causes, as receipts, metrics and the audit log give them."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

CAUSES = ("policy", "declared", "undeclared", "template", "tools", "failover", "engine")
"""Why tokens were lost; ``engine``: nothing was edited, and it didn't have them any more."""

ForgetResult = Literal["erased", "pending", "owed", "unreachable"]
"""``erased``: all that it reaches is overwritten. ``pending``: running requests still hold some.
``owed``: an engine has not confirmed it, and is asked until it does. ``unreachable``: text may lie
in a cache where no forget finds it, because the conversation had no name or the engine takes no
forgets."""


class Decision(StrEnum):
    """What becomes of edits that could wait."""

    NOTHING = "nothing"
    """There are none."""
    UNTIMED = "untimed"
    """They are made for another reason than their tokens, or cost nothing on this engine."""
    PRESSURE = "pressure"
    """They are committed: the prompt fills too much of the window."""
    PAYS = "pays"
    """They are committed: what they reclaim pays for what is computed anew."""
    HELD = "held"
    """They wait."""
