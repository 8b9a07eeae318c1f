"""The fate of a request when one of its policies fails.

A policy that only tidies up is left out of the turn. One that forgets isn't: the text that it was
to remove would reach the engine, so the request is refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from leyline_policies.policy import Policy

OnFault = Literal["refuse", "skip"]
"""``refuse``: the request isn't sent. ``skip``: it is sent without what the policy would edit."""


def may_forget(policy: Policy) -> bool:
    """Return True if any edit of the policy may be a forget, as far as the policy declares."""
    try:
        return policy.mode != "amortize" or bool(getattr(policy, "forgets", False))
    except Exception:  # a plugin's attribute may be anything; its answer isn't known
        return True


def on_fault_of(policy: Policy) -> OnFault | None:
    """Return the choice for this policy; None if there is none."""
    chosen = getattr(policy, "on_fault", None)
    return chosen if chosen in ("refuse", "skip") else None


def fails_closed(policy: Policy, otherwise: OnFault, *, forgot: bool = False) -> bool:
    """Return True if a fault of the policy refuses the request.

    Args:
        otherwise: the rule for policies that forget and have no choice of their own.
        forgot: True if it has forgotten before, whatever it says of itself.
    """
    unchosen = otherwise if forgot or may_forget(policy) else "skip"
    return (on_fault_of(policy) or unchosen) == "refuse"


def strictest_on_fault(policies: Iterable[Policy]) -> OnFault | None:
    """Return the choice for several policies that fail as one."""
    chosen = [on_fault_of(policy) for policy in policies if may_forget(policy)]
    chosen += [choice for policy in policies if (choice := on_fault_of(policy)) == "refuse"]
    if "refuse" in chosen:
        return "refuse"
    return "skip" if chosen and None not in chosen else None
