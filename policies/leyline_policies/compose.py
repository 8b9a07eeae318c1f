"""Policies made of policies: pipelines, conditions, guards, dry runs.

A policy with a condition acts on the *committed* part of the conversation: the messages up to where
the condition last held. Edited messages stay edited, and newer messages stay whole until the
condition holds again, for the messages that would be sent then. So an edit costs the cache once,
not on every turn.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from leyline_policies.alignment import align, put_back, rejoin
from leyline_policies.context import Context, apply, run
from leyline_policies.conversation import (
    RESULT_ROLES,
    ToolCall,
    instructions_end,
    pair_calls,
    tags_of,
    with_partners,
)
from leyline_policies.faults import OnFault, may_forget, on_fault_of, strictest_on_fault
from leyline_policies.gates import Gate, all_of, at_least_gate, every_gate, when_gate
from leyline_policies.marks import without_dropped
from leyline_policies.policy import Message, Mode, Policy
from leyline_policies.promises import still_forgotten, strictest
from leyline_policies.triggers import Trigger


@dataclass(frozen=True, slots=True)
class Wrapper:
    """A policy around another, called like it."""

    policy: Policy

    @property
    def name(self) -> str:
        """The inner policy's name."""
        return self.policy.name

    @property
    def mode(self) -> Mode:
        """The inner policy's mode."""
        return self.policy.mode

    @property
    def trusted(self) -> bool:
        """True if the inner policy is trusted."""
        return _trusted(self.policy)

    @property
    def edits(self) -> bool:
        """True if the inner policy edits."""
        return _edits(self.policy)

    @property
    def forgets(self) -> bool:
        """True if the inner policy may forget."""
        return may_forget(self.policy)

    @property
    def on_fault(self) -> OnFault | None:
        """The choice for the inner policy's faults."""
        return on_fault_of(self.policy)


@dataclass(frozen=True, slots=True)
class Chosen(Wrapper):
    """A policy with a choice for its faults."""

    choice: OnFault

    @property
    def on_fault(self) -> OnFault | None:
        """The choice."""
        return self.choice

    def transform(self, messages: list[Message], turn_idx: int, context: Context) -> list[Message]:
        """Return the inner policy's messages."""
        return run(self.policy, messages, turn_idx, context)


@dataclass(frozen=True, slots=True)
class Gated(Wrapper):
    """A policy that acts on the committed part only."""

    gate: Gate

    def transform(self, messages: list[Message], turn_idx: int, context: Context) -> list[Message]:
        """Return the inner policy's edit of the committed part, and the rest as it is."""
        state = context.state
        committed = min(int(state.get("committed", 0)), len(messages))
        committed = whole_pairs(messages, committed, context.calls(messages))
        state["committed"] = committed
        # Attempts leave no mark in the inner policy's state until they are taken over.
        tried = context.attempt()
        edited = self._edited(messages, committed, tried)

        def gain() -> int:
            inner = context.attempt().inner(self.policy.name)
            attempt = apply(self.policy, list(messages), turn_idx, inner)
            return context.total(without_dropped(edited)) - context.total(attempt)

        # Gates judge the messages that would be sent: the client resends messages edited long ago,
        # so its own list would hold gates open for ever.
        if committed < len(messages) and self.gate.opens(without_dropped(edited), context, gain):
            state["committed"] = len(messages)
            state.update(turn=context.turn, turn_idx=turn_idx, idle_s=context.idle_s)
            return self._edited(messages, len(messages), context)
        state.update(tried.state)
        context.notes.extend(tried.notes)
        return edited

    def _edited(self, messages: list[Message], committed: int, context: Context) -> list[Message]:
        if not committed:
            return messages
        state = context.state
        inner = context.inner(self.policy.name, state.get("turn"), state.get("idle_s"))
        part = messages[:committed]
        edited = run(self.policy, part, int(state.get("turn_idx", 0)), inner)
        return messages if edited is part else [*edited, *messages[committed:]]


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Policies one after the other, as one. All in the strictest mode among them."""

    name: str
    policies: tuple[Policy, ...]

    @property
    def mode(self) -> Mode:
        """``forget`` if any of them forgets."""
        return "forget" if any(policy.mode == "forget" for policy in self.policies) else "amortize"

    @property
    def trusted(self) -> bool:
        """True if all of them are trusted."""
        return all(map(_trusted, self.policies))

    @property
    def edits(self) -> bool:
        """True if any of them edits."""
        return any(map(_edits, self.policies))

    @property
    def forgets(self) -> bool:
        """True if any of them may forget."""
        return any(map(may_forget, self.policies))

    @property
    def on_fault(self) -> OnFault | None:
        """The choice for all: if one of them fails, none of their edits is made."""
        return strictest_on_fault(self.policies)

    def transform(self, messages: list[Message], turn_idx: int, context: Context) -> list[Message]:
        """Give each policy the messages of the one before, and return the last one's."""
        given, known = messages, set(map(id, messages))
        for place, policy in enumerate(self.policies):
            live = without_dropped(messages)
            # The very list that was passed on: results for it hold.
            live = live if len(live) < len(messages) else messages
            after = run(policy, live, turn_idx, context.inner(f"{place}.{policy.name}"))
            if after is live:
                continue
            after = still_forgotten(live, after, known)
            messages = rejoin(messages, live, after) if len(live) < len(messages) else after
        return strictest(given, messages) if self.mode == "forget" else messages


def _trusted(policy: Policy) -> bool:
    return bool(getattr(policy, "trusted", False))


def _edits(policy: Policy) -> bool:
    return bool(getattr(policy, "edits", True))


@dataclass(frozen=True, slots=True)
class Protected(Wrapper):
    """A policy that may not touch some messages."""

    keep_first: int = 0
    keep_last: int = 0
    roles: frozenset[str] = frozenset()
    tools: frozenset[str] = frozenset()
    tags: frozenset[str] = frozenset()

    def transform(self, messages: list[Message], turn_idx: int, context: Context) -> list[Message]:
        """Return the inner policy's messages, with the protected messages put back."""
        edited = run(self.policy, messages, turn_idx, context.inner(self.policy.name))
        if edited is messages:
            return messages
        kept = self.guarded(messages, context)
        return put_back(messages, edited, kept) if kept else edited

    def guarded(self, messages: list[Message], context: Context) -> set[int]:
        """Return the places of the protected messages."""
        count = len(messages)
        # The instructions at the front aren't what "first" means.
        head = instructions_end(messages)
        kept = set(range(min(count, head + self.keep_first) if self.keep_first else 0))
        kept |= set(range(max(0, count - self.keep_last), count))
        kept |= {i for i, m in enumerate(messages) if m.get("role") in self.roles}
        if self.tags:
            kept |= {i for i, m in enumerate(messages) if not self.tags.isdisjoint(tags_of(m))}
        calls = context.calls(messages)
        if self.tools:
            kept |= {i for i, m in enumerate(messages) if _result_of(m) in self.tools}
        for call in calls:
            if call.name in self.tools:
                kept.update((call.message, *call.results))
        return {index for index in with_partners(kept, calls) if 0 <= index < count}


@dataclass(frozen=True, slots=True)
class DryRun(Wrapper):
    """A policy that reports its edits and makes none."""

    @property
    def mode(self) -> Mode:
        """``amortize``: nothing is edited."""
        return "amortize"

    @property
    def forgets(self) -> bool:
        """False: nothing is forgotten."""
        return False

    @property
    def on_fault(self) -> OnFault | None:
        """``skip``: nothing is missing if it fails."""
        return "skip"

    def transform(self, messages: list[Message], turn_idx: int, context: Context) -> list[Message]:
        """Return the messages as they are; the note ``dry_run`` reports the edit not made."""
        edited = apply(self.policy, messages, turn_idx, context.inner(self.policy.name))
        pairs = align(messages, edited)
        same = sum(messages[old] == edited[new] for old, new in pairs)
        context.note(
            "dry_run",
            messages=len(messages) - same,
            reclaimed_tokens=context.total(messages) - context.total(edited),
        )
        return messages


def _result_of(message: Message) -> object:
    """Return the tool that a result names itself; most don't."""
    return message.get("name") if message.get("role") in RESULT_ROLES else None


def pipeline(*policies: Policy, name: str = "pipeline") -> Policy:
    """Return the policies one after the other, as one."""
    return Pipeline(name, policies)


def when(trigger: Trigger, policy: Policy) -> Policy:
    """Return ``policy`` on all that had been said when ``trigger`` last held."""
    return _gated(policy, when_gate(trigger))


def every(turns: int, policy: Policy) -> Policy:
    """Return ``policy`` on all that had been said at every ``turns``-th turn.

    Raises:
        ValueError: fewer than one turn.
    """
    return _gated(policy, every_gate(turns))


def at_least(tokens: int, policy: Policy) -> Policy:
    """Return ``policy`` for when it reclaims this many tokens more than it has reclaimed already.

    Raises:
        ValueError: fewer than one token.
    """
    return _gated(policy, at_least_gate(tokens))


def all_gates(policy: Policy, gates: Sequence[Gate]) -> Policy:
    """Return ``policy`` on all that had been said when every gate was last open at once."""
    return _gated(policy, all_of(gates))


def protect(
    policy: Policy,
    *,
    keep_first: int = 0,
    keep_last: int = 0,
    roles: Collection[str] = (),
    tools: Collection[str] = (),
    tags: Collection[str] = (),
) -> Policy:
    """Return ``policy`` without effect on some messages and those paired with them.

    Args:
        keep_first: messages after the instructions at the front (which then stay as well).
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
    """Return ``policy`` without effect; it reports its edits."""
    return DryRun(policy)


def whole_pairs(
    messages: Sequence[Message], end: int, calls: Sequence[ToolCall] | None = None
) -> int:
    """Return the largest end of ``end`` or less that splits no call from its results.

    Args:
        calls: of the messages, if already known.
    """
    if not 0 < end < len(messages):
        return end
    for call in reversed(pair_calls(messages) if calls is None else calls):
        if call.message < end and any(index >= end for index in call.results):
            end = call.message
    # Results that answer no call aren't separated from those before them either.
    while end > 0 and messages[end].get("role") in RESULT_ROLES:
        end -= 1
    return end


def _gated(policy: Policy, gate: Gate) -> Policy:
    if may_forget(policy):
        raise ValueError(
            f"{policy.name} forgets, and that never waits: leave out when, every and at_least"
        )
    return Gated(policy, gate)
