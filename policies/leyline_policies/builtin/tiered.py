"""The policy that compacts in tiers: the next one only while the conversation is still too long."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from operator import is_
from typing import ClassVar

from leyline_policies.builtin.inner import (
    adopt,
    check_inner,
    check_limit,
    limit_of,
    run_all,
    trusts,
)
from leyline_policies.builtin.tool_results import check_numbers
from leyline_policies.compose import whole_pairs
from leyline_policies.context import Context, State
from leyline_policies.faults import OnFault, strictest_on_fault
from leyline_policies.policy import Message, Mode, Policy

_MOST_TIERS = 6
_ENDS, _WAITING = "ends", "waiting"


@dataclass(frozen=True, slots=True)
class Tiered:
    """Compact a conversation of more than ``target_tokens`` tokens, with cheap means first.

    Once the messages to be sent are over the target (or ``target_fraction`` of the model's
    window), the first of ``tiers`` acts on all that has been said; if they are still over it, the
    second acts on what the first left, and so on. What a tier has done stays, and newer messages
    stay whole until the target is exceeded again: then it begins with the first tier again. The
    cache pays for each such step, and for none between them. A tier is a spec, such as
    ``clear_tool_uses:trigger_tokens=0``, or a pipeline of several; its own trigger holds as well,
    so set that low. While a tier waits for a model's answer, no further step is made, for
    ``patience_turns`` turns at most; then the tiers after it are tried, too.

    The rule is that of pydantic-ai-harness 0.62 (``TieredCompaction``). Different from it: a step
    that reclaims nothing isn't made.
    """

    name: ClassVar[str] = "tiered"
    mode: ClassVar[Mode] = "amortize"

    tiers: tuple[Policy, ...]
    target_tokens: int | None = None
    target_fraction: float | None = None
    patience_turns: int = 5

    def __post_init__(self) -> None:
        """Raise ValueError for tiers that can't wait, too many of them, or not one target."""
        check_inner("tiers", self.tiers, most=_MOST_TIERS)
        check_limit("target", self.target_tokens, self.target_fraction)
        check_numbers(1, patience_turns=self.patience_turns)
        if self.target_tokens is None and self.target_fraction is None:
            raise ValueError("target_tokens and target_fraction are both none; give one")

    @property
    def policies(self) -> tuple[Policy, ...]:
        """The tiers."""
        return self.tiers

    @property
    def trusted(self) -> bool:
        """True if all tiers are trusted."""
        return trusts(self.tiers)

    @property
    def on_fault(self) -> OnFault | None:
        """The choice for all: if one of them fails, none of their edits is made."""
        return strictest_on_fault(self.tiers)

    def transform(self, messages: list[Message], turn_idx: int, context: Context) -> list[Message]:
        """Return the messages after the tiers that have been reached."""
        target = limit_of(self.target_tokens, self.target_fraction, context)
        held = context.attempt()
        _shorten(messages, held)
        sent = self._sent(messages, turn_idx, held)
        total = context.total(sent)
        if target is None or total <= target:
            held.state.pop(_WAITING, None)
        elif self._waits(held):
            held.state[_WAITING] = held.state.get(_WAITING, context.turn)
        else:
            further = self._further(messages, turn_idx, held, target)
            if context.total(further[0]) < total or further[1].wanted:
                sent, held = further
        adopt(context, held)
        return sent

    def _waits(self, held: Context) -> bool:
        """Return True while an answer is missing that may still come."""
        since = held.state.get(_WAITING, held.turn)
        return bool(held.wanted) and held.turn - since < self.patience_turns

    def _further(
        self, messages: list[Message], turn_idx: int, held: Context, target: int
    ) -> tuple[list[Message], Context]:
        """Return the messages after one more step, and its context.

        The step ends at a tier that waits for an answer, unless one has been missing for too long.
        """
        late = bool(held.wanted)
        sent, tried = messages, held
        for level in range(1, len(self.tiers) + 1):
            tried = held.attempt()
            tried.state.pop(_WAITING, None)
            self._commit(level, len(messages), tried.state)
            sent = self._sent(messages, turn_idx, tried)
            if tried.wanted:
                tried.state[_WAITING] = held.turn
            if held.total(sent) <= target or (tried.wanted and not late):
                break
        return sent, tried

    def _sent(self, messages: list[Message], turn_idx: int, context: Context) -> list[Message]:
        """Return the messages after each level: its tiers act on what the level below it left.

        Level *n* is the first *n* tiers, on the messages up to its end. A lower level ends later.
        """
        ends = context.state.get(_ENDS, {})
        sent, done = messages[:0], 0
        for level in range(len(self.tiers), 0, -1):
            end = ends.get(str(level), 0)
            if end <= done:
                continue
            sent, done = [*sent, *messages[done:end]], end
            sent = run_all(self.tiers[:level], sent, turn_idx, context.inner(str(level)))
        if not done:
            return messages
        sent = [*sent, *messages[done:]]
        same = len(sent) == len(messages) and all(map(is_, sent, messages))
        return messages if same else sent

    def _commit(self, level: int, end: int, state: State) -> None:
        """Let the first tiers act up to ``end``; their states continue those of their last run."""
        ends, inner = state.setdefault(_ENDS, {}), state.setdefault("inner", {})
        states: State = {}
        for place, tier in enumerate(self.tiers[:level]):
            slot = f"{place}.{tier.name}"
            known = [n for n in map(str, range(place + 1, len(self.tiers) + 1)) if n in ends]
            last = inner.get(known[0], {}).get("inner", {}) if known else {}
            states[slot] = deepcopy(last.get(slot, {}))
        for lower in map(str, range(1, level)):
            ends.pop(lower, None)
            inner.pop(lower, None)
        ends[str(level)] = end
        inner[str(level)] = {"inner": states}


def _shorten(messages: list[Message], context: Context) -> None:
    """Move the ends of levels back to where the messages end now, and no call is cut apart."""
    ends = context.state.get(_ENDS, {})
    if any(end > len(messages) for end in ends.values()):
        calls = context.calls(messages)
        for level, end in ends.items():
            ends[level] = whole_pairs(messages, min(end, len(messages)), calls)
