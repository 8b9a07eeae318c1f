"""Settings that every policy takes besides its own: when it acts, and on which messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from leyline_policies.errors import SpecError, did_you_mean, shown
from leyline_policies.faults import OnFault
from leyline_policies.parameters import read_parameters
from leyline_policies.policy import Policy

if TYPE_CHECKING:
    from leyline_policies.triggers import Trigger

# `compose` and `triggers` are imported where a policy is wrapped: most aren't, and a program that
# only imports this package shouldn't wait for them.
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")


@dataclass(frozen=True, slots=True)
class Modifiers:
    """The wrapping of a policy; the defaults wrap nothing.

    Conditions must hold together for the policy to act on new messages; those that it has edited
    stay edited (`leyline_policies.compose`).
    """

    when: Annotated[str, "a trigger, such as 'tokens > 100000 and idle > 5m'"] = ""
    every: Annotated[int, "act on every n-th turn"] = 1
    at_least: Annotated[int, "act once this many tokens are reclaimed"] = 0
    protect_first: Annotated[int, "messages after the instructions that stay"] = 0
    protect_last: Annotated[int, "messages at the end that stay"] = 0
    protect_roles: Annotated[tuple[str, ...], "roles whose messages stay"] = ()
    protect_tools: Annotated[tuple[str, ...], "tools whose calls and results stay"] = ()
    protect_tags: Annotated[tuple[str, ...], "messages with one of these tags stay"] = ()
    recallable: Annotated[bool, "leave a stub with an address where it evicts text"] = False
    notices: Annotated[bool, "leave a note to the model where it removes messages"] = False
    dry_run: Annotated[bool, "report what it would do, and edit nothing"] = False
    on_fault: Annotated[OnFault | None, "when it fails: refuse the request, or skip it"] = None

    def __post_init__(self) -> None:
        """Raise ValueError for a number out of range or an unknown role."""
        for key in ("at_least", "protect_first", "protect_last"):
            if getattr(self, key) < 0:
                raise ValueError(f"{key}={getattr(self, key)} is negative; it must be 0 or more")
        for role in self.protect_roles:
            if role not in _ROLES:
                raise ValueError(
                    f"protect_roles: {shown(role)} is no role{did_you_mean(role, _ROLES) or ';'} "
                    f"(known: {', '.join(_ROLES)})"
                )

    def around(self, policy: Policy) -> Policy:
        """Return ``policy`` with these settings.

        Raises:
            ValueError: a number out of range, a trigger that can't be read, a policy that forgets
            and is to be recallable or to leave notices.
        """
        from leyline_policies.compose import Chosen, all_gates, dry_run
        from leyline_policies.gates import at_least_gate, every_gate, when_gate

        policy = self._with_notices(self._recallable(self._protected(policy)))
        gates = [
            *([when_gate(_trigger(self.when))] if self.when else ()),
            *([every_gate(self.every)] if self.every != 1 else ()),
            *([at_least_gate(self.at_least)] if self.at_least else ()),
        ]
        policy = all_gates(policy, gates) if gates else policy
        policy = policy if self.on_fault is None else Chosen(policy, self.on_fault)
        return dry_run(policy) if self.dry_run else policy

    def _recallable(self, policy: Policy) -> Policy:
        if not self.recallable:
            return policy
        from leyline_policies.recallable import recallable

        return recallable(policy)

    def _with_notices(self, policy: Policy) -> Policy:
        if not self.notices:
            return policy
        from leyline_policies.notices import notices

        return notices(policy)

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
        from leyline_policies.compose import protect

        return protect(
            policy,
            keep_first=self.protect_first,
            keep_last=self.protect_last,
            roles=self.protect_roles,
            tools=self.protect_tools,
            tags=self.protect_tags,
        )


def _trigger(text: str) -> Trigger:
    from leyline_policies.triggers import parse_trigger

    try:
        return parse_trigger(text)
    except SpecError as error:
        raise SpecError(f"when: {error}") from error


MODIFIERS = read_parameters(Modifiers)
