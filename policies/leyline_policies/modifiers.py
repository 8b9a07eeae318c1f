"""Settings that every policy takes besides its own: when it acts, and on what it may not."""

from __future__ import annotations

from dataclasses import dataclass

from leyline_policies.compose import (
    all_gates,
    at_least_gate,
    dry_run,
    every_gate,
    protect,
    when_gate,
)
from leyline_policies.parameters import read_parameters
from leyline_policies.policy import Policy
from leyline_policies.triggers import parse_trigger


@dataclass(frozen=True, slots=True)
class Modifiers:
    """How a policy is wrapped; the defaults wrap nothing.

    Conditions must hold together for the policy to act on what is new; what it has edited stays
    edited (`leyline_policies.compose`).
    """

    when: str = ""
    """A trigger, such as ``"tokens > 100000"``."""
    every: int = 1
    """Turns."""
    at_least: int = 0
    """Tokens to be reclaimed."""
    protect_first: int = 0
    protect_last: int = 0
    protect_roles: tuple[str, ...] = ()
    protect_tools: tuple[str, ...] = ()
    protect_tags: tuple[str, ...] = ()
    dry_run: bool = False

    def around(self, policy: Policy) -> Policy:
        """``policy`` with these settings.

        Raises:
            ValueError: a number out of range, a trigger that can't be read.
        """
        policy = self._protected(policy)
        gates = [
            *([when_gate(parse_trigger(self.when))] if self.when else ()),
            *([every_gate(self.every)] if self.every != 1 else ()),
            *([at_least_gate(self.at_least)] if self.at_least else ()),
        ]
        policy = all_gates(policy, gates) if gates else policy
        return dry_run(policy) if self.dry_run else policy

    def _protected(self, policy: Policy) -> Policy:
        guards = (
            self.protect_first,
            self.protect_last,
            self.protect_roles,
            self.protect_tools,
            self.protect_tags,
        )
        if not any(guards):
            return policy
        return protect(
            policy,
            keep_first=self.protect_first,
            keep_last=self.protect_last,
            roles=self.protect_roles,
            tools=self.protect_tools,
            tags=self.protect_tags,
        )


MODIFIERS = read_parameters(Modifiers)
