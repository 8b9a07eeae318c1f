"""Policies made of policies: pipelines, conditions, guards, dry runs.

Whatever has a condition acts on the *committed* part of the conversation: the messages up to where
the condition last held. What was edited once stays edited, and newer messages stay whole until the
condition holds again. So an edit costs the cache once, not on every turn.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from leyline_policies.context import Context, apply, run
from leyline_policies.conversation import RESULT_ROLES, pair_calls, tags_of
from leyline_policies.marks import pair_by_origin, without_dropped
from leyline_policies.policy import Message, Mode, Policy
from leyline_policies.triggers import Trigger


class Gate(Protocol):
    """When the committed part may grow."""

    def opens(self, messages: Sequence[Message], context: Context, gain: Callable[[], int]) -> bool:
        """Whether to commit all messages; ``gain()`` is how many tokens that would reclaim."""


@dataclass(frozen=True, slots=True)
class _OnTrigger:
    trigger: Trigger

    def opens(self, messages: Sequence[Message], context: Context, gain: Callable[[], int]) -> bool:
        return self.trigger.fires(messages, context)


@dataclass(frozen=True, slots=True)
class _EveryTurns:
    turns: int

    def opens(self, messages: Sequence[Message], context: Context, gain: Callable[[], int]) -> bool:
        since = context.state.get("turn")
        return since is None or context.turn - since >= self.turns


@dataclass(frozen=True, slots=True)
class _Reclaims:
    tokens: int

    def opens(self, messages: Sequence[Message], context: Context, gain: Callable[[], int]) -> bool:
        return gain() >= self.tokens


@dataclass(frozen=True, slots=True)
class _Together:
    gates: tuple[Gate, ...]

    def opens(self, messages: Sequence[Message], context: Context, gain: Callable[[], int]) -> bool:
        return all(gate.opens(messages, context, gain) for gate in self.gates)


@dataclass(frozen=True, slots=True)
class Gated:
    """A policy that acts on the committed part only."""

    policy: Policy
    gate: Gate

    @property
    def name(self) -> str:
        """The inner policy's."""
        return self.policy.name

    @property
    def mode(self) -> Mode:
        """The inner policy's."""
        return self.policy.mode

    def transform(self, messages: list[Message], turn_idx: int, context: Context) -> list[Message]:
        """What the inner policy makes of the committed part, and the rest as it is."""
        state = context.state
        committed = whole_pairs(messages, min(int(state.get("committed", 0)), len(messages)))

        def gain() -> int:
            before = without_dropped(self._edited(messages, committed, context))
            # The attempt must not leave its mark in the inner policy's state.
            attempt = apply(self.policy, messages, turn_idx, context.attempt())
            return context.total(before) - context.total(attempt)

        if committed < len(messages) and self.gate.opens(messages, context, gain):
            committed = len(messages)
            state.update(turn=context.turn, turn_idx=turn_idx, idle_s=context.idle_s)
        state["committed"] = committed
        return self._edited(messages, committed, context)

    def _edited(self, messages: list[Message], committed: int, context: Context) -> list[Message]:
        if not committed:
            return messages
        state = context.state
        inner = context.inner(self.policy.name, state.get("turn"), state.get("idle_s"))
        edited = run(self.policy, messages[:committed], int(state.get("turn_idx", 0)), inner)
        return [*edited, *messages[committed:]]


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Policies one after the other, as one. All in the strictest mode among them."""

    name: str
    policies: tuple[Policy, ...]

    @property
    def mode(self) -> Mode:
        """Forget, if any of them forgets."""
        return "forget" if any(policy.mode == "forget" for policy in self.policies) else "amortize"

    def transform(self, messages: list[Message], turn_idx: int, context: Context) -> list[Message]:
        """Each policy gets what the one before made."""
        for place, policy in enumerate(self.policies):
            inner = context.inner(f"{place}.{policy.name}")
            messages = without_dropped(run(policy, messages, turn_idx, inner))
        return messages


@dataclass(frozen=True, slots=True)
class Protected:
    """A policy that may not touch some messages."""

    policy: Policy
    keep_first: int = 0
    keep_last: int = 0
    roles: frozenset[str] = frozenset()
    tools: frozenset[str] = frozenset()
    tags: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        """The inner policy's."""
        return self.policy.name

    @property
    def mode(self) -> Mode:
        """The inner policy's."""
        return self.policy.mode

    def transform(self, messages: list[Message], turn_idx: int, context: Context) -> list[Message]:
        """What the inner policy makes, with the protected messages put back."""
        edited = run(self.policy, messages, turn_idx, context.inner(self.policy.name))
        kept = self._protected(messages)
        if not kept:
            return edited
        return put_back(messages, edited, kept)

    def _protected(self, messages: Sequence[Message]) -> set[int]:
        count = len(messages)
        # The instructions in front aren't what "first" means.
        head = next(
            (i for i, m in enumerate(messages) if m.get("role") not in ("system", "developer")),
            count,
        )
        kept = set(range(head + self.keep_first if self.keep_first else 0))
        kept |= set(range(count - self.keep_last, count))
        kept |= {i for i, m in enumerate(messages) if m.get("role") in self.roles}
        if self.tags:
            kept |= {i for i, m in enumerate(messages) if not self.tags.isdisjoint(tags_of(m))}
        calls = pair_calls(messages)
        kept |= {i for call in calls if call.name in self.tools for i in call.results}
        # A call and its results stay together, and so do the calls of one message.
        for call in calls:
            if call.message in kept or not kept.isdisjoint(call.results):
                kept.add(call.message)
        for call in calls:
            if call.message in kept:
                kept.update(call.results)
        return {index for index in kept if 0 <= index < count}


@dataclass(frozen=True, slots=True)
class DryRun:
    """A policy that reports what it would do and does nothing."""

    policy: Policy

    @property
    def name(self) -> str:
        """The inner policy's."""
        return self.policy.name

    @property
    def mode(self) -> Mode:
        """Nothing is edited."""
        return "amortize"

    def transform(self, messages: list[Message], turn_idx: int, context: Context) -> list[Message]:
        """The messages as they are; the note ``dry_run`` says what would have been."""
        edited = apply(self.policy, messages, turn_idx, context.inner(self.policy.name))
        kept = {after for _, after in pair_by_origin(messages, edited)}
        same = sum(1 for index in kept if any(edited[index] is m for m in messages))
        context.note(
            "dry_run",
            messages=len(messages) - same,
            reclaimed_tokens=context.total(messages) - context.total(edited),
        )
        return messages


def pipeline(*policies: Policy, name: str = "pipeline") -> Policy:
    """The policies one after the other, as one."""
    return Pipeline(name, policies)


def when(trigger: Trigger, policy: Policy) -> Policy:
    """``policy`` on all that had been said when ``trigger`` last held."""
    return Gated(policy, when_gate(trigger))


def every(turns: int, policy: Policy) -> Policy:
    """``policy`` on all that had been said at every ``turns``-th turn.

    Raises:
        ValueError: fewer than one turn.
    """
    return Gated(policy, every_gate(turns))


def at_least(tokens: int, policy: Policy) -> Policy:
    """``policy`` once it reclaims this many tokens more than it has reclaimed already.

    Raises:
        ValueError: fewer than one token.
    """
    return Gated(policy, at_least_gate(tokens))


def when_gate(trigger: Trigger) -> Gate:
    """Opens while ``trigger`` holds."""
    return _OnTrigger(trigger)


def every_gate(turns: int) -> Gate:
    """Opens ``turns`` turns after it opened last.

    Raises:
        ValueError: fewer than one turn.
    """
    if turns < 1:
        raise ValueError(f"every={turns}: it must be 1 turn or more")
    return _EveryTurns(turns)


def at_least_gate(tokens: int) -> Gate:
    """Opens when that reclaims this many tokens.

    Raises:
        ValueError: fewer than one token.
    """
    if tokens < 1:
        raise ValueError(f"at_least={tokens}: it must be 1 token or more")
    return _Reclaims(tokens)


def all_gates(policy: Policy, gates: Sequence[Gate]) -> Policy:
    """``policy`` on all that had been said when every gate was last open at once."""
    return Gated(policy, _Together(tuple(gates)))


def protect(
    policy: Policy,
    *,
    keep_first: int = 0,
    keep_last: int = 0,
    roles: Collection[str] = (),
    tools: Collection[str] = (),
    tags: Collection[str] = (),
) -> Policy:
    """``policy`` without effect on some messages; what belongs to them as a pair stays too.

    Args:
        keep_first: messages behind the instructions in front (which then stay as well).
        keep_last: messages at the end.
        roles: whole roles.
        tools: calls of these tools and their results.
        tags: messages that carry one of these tags.

    Raises:
        ValueError: a negative number.
    """
    if keep_first < 0 or keep_last < 0:
        raise ValueError("protect: keep_first and keep_last must be 0 or more")
    return Protected(
        policy, keep_first, keep_last, frozenset(roles), frozenset(tools), frozenset(tags)
    )


def dry_run(policy: Policy) -> Policy:
    """``policy`` without effect; it reports what it would do."""
    return DryRun(policy)


def whole_pairs(messages: Sequence[Message], end: int) -> int:
    """The largest part ``[0, end)`` or shorter that splits no call from its results."""
    while 0 < end < len(messages) and messages[end].get("role") in RESULT_ROLES:
        end -= 1
        while end > 0 and messages[end].get("role") in RESULT_ROLES:
            end -= 1
    return end


def put_back(
    before: Sequence[Message], after: Sequence[Message], kept: Collection[int]
) -> list[Message]:
    """``after`` with the messages ``kept`` of ``before`` as they were, in their places."""
    pairs = pair_by_origin(before, after)
    result: list[Message] = []
    old_at = new_at = 0
    for old, new in [*pairs, (len(before), len(after))]:
        # What the policy put in stays in front of what it took away and must give back.
        result += after[new_at:new]
        result += [before[i] for i in range(old_at, old) if i in kept]
        if old < len(before):
            result.append(before[old] if old in kept else after[new])
        old_at, new_at = old + 1, new + 1
    return result
