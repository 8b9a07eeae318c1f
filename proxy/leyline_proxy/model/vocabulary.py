"""Names of results and causes in receipts, metrics and the audit log."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

CAUSES = (
    "policy",
    "declared",
    "undeclared",
    "compaction",
    "template",
    "tools",
    "recall",
    "session",
    "failover",
    "engine",
)
"""Reasons for lost tokens; ``engine``: nothing was edited, but the engine no longer had them."""

PAGE_CAUSE = "page"
"""Cause of lost tokens that fill no page, as engines cache whole pages; only in turns' accounts."""

MODEL_CAUSE = "model"
"""Cause of tokens that another model of the session had; only in turns' accounts, since that model
still has them."""

RECALL = "recall"
"""Cause of what a recall changes in a turn's messages."""

ForgetResult = Literal["erased", "pending", "owed", "unreachable"]
"""``erased``: everything it reaches is overwritten. ``pending``: running requests still hold some.
``owed``: an engine hasn't confirmed it and is asked until it does. ``unreachable``: text may be in
a cache where no forget finds it, because the conversation had no name or the engine takes no
forgets."""


class Decision(StrEnum):
    """The outcome for edits that could wait."""

    NOTHING = "nothing"
    """No edits could wait."""
    UNTIMED = "untimed"
    """The edits have another reason than their tokens, or cost nothing on this engine."""
    PRESSURE = "pressure"
    """The edits are committed: the prompt fills too much of the window."""
    PAYS = "pays"
    """The edits are committed: the reclaimed tokens pay for those computed again."""
    HELD = "held"
    """The edits wait."""
