"""Common parts of the policies that hold other policies."""

from __future__ import annotations

from collections.abc import Sequence

from leyline_policies.context import Context, run
from leyline_policies.faults import may_forget
from leyline_policies.marks import without_dropped
from leyline_policies.policy import Message, Policy


def check_inner(key: str, policies: Sequence[Policy], most: int | None = None) -> None:
    """Raise ValueError for no policies, too many, or one that forgets, which never waits."""
    if not policies:
        raise ValueError(f"{key}=[] names no policy; give a list of specs")
    if most is not None and len(policies) > most:
        raise ValueError(f"{key} has {len(policies)} policies; it takes {most} at most")
    for policy in policies:
        if may_forget(policy):
            raise ValueError(
                f"{key}: {policy.name} forgets, and that never waits; put it beside this policy"
            )


def check_limit(prefix: str, tokens: int | None, fraction: float | None) -> None:
    """Raise ValueError for a limit out of range, or for two."""
    if tokens is not None and tokens < 1:
        raise ValueError(f"{prefix}_tokens={tokens} must be 1 or more")
    if fraction is not None and not 0 < fraction <= 1:
        raise ValueError(f"{prefix}_fraction={fraction} must be above 0 and at most 1")
    if tokens is not None and fraction is not None:
        raise ValueError(f"{prefix}_tokens and {prefix}_fraction are both given; give one")


def limit_of(tokens: int | None, fraction: float | None, context: Context) -> int | None:
    """Return a limit in tokens; None without one, or if the model's window isn't known."""
    if tokens is not None:
        return tokens
    if fraction is None or context.window is None:
        return None
    return max(1, int(context.window * fraction))


def run_all(
    policies: Sequence[Policy], messages: list[Message], turn_idx: int, context: Context
) -> list[Message]:
    """Return the messages after all of the policies; the given list if none edits.

    Unlike a pipeline's, its policies never forget, so no promise has to outlast a later edit.
    """
    for place, policy in enumerate(policies):
        own = context.inner(f"{place}.{policy.name}")
        messages = without_dropped(run(policy, messages, turn_idx, own))
    return messages


def trusts(policies: Sequence[Policy]) -> bool:
    """Return True if all of the policies are trusted."""
    return all(bool(getattr(policy, "trusted", False)) for policy in policies)


def adopt(context: Context, tried: Context) -> None:
    """Take over the state and the reports of an attempt."""
    context.state.clear()
    context.state.update(tried.state)
    context.notes.extend(tried.notes)
    context.wanted.extend(tried.wanted)
    context.used.update(tried.used)
