"""Messages in quarantine: those that a session has there already, and those that come to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from leyline_policies.context import Context
from leyline_policies.faults import OnFault
from leyline_policies.policy import Message, Mode
from leyline_policies.verbs import quarantined, quarantined_for

from ..model.prepared import POLICY, Quarantined
from .stage import Stage


@dataclass(frozen=True, slots=True)
class Condemned:
    """Carry out one policy's verdicts of earlier turns. Its edits are the same as that policy's."""

    mode: ClassVar[Mode] = "forget"
    trusted: ClassVar[bool] = True
    on_fault: ClassVar[OnFault] = "refuse"

    name: str
    whys: Mapping[int, str]
    """Words of the stubs, by place in the list."""

    def transform(self, messages: list[Message], turn_idx: int, context: Context) -> list[Message]:
        """Return the messages with stubs."""
        stubbed = list(messages)
        for place, why in self.whys.items():
            make = partial(quarantined, why=why)
            stubbed[place] = context.once(messages[place], make, ("quarantined", why))
        return stubbed


def condemnations(stage: Stage, condemned: Mapping[int, Quarantined]) -> Iterator[Condemned]:
    """Yield the policies that put stubs in the places of condemned messages.

    Args:
        condemned: by index in the client's list.
    """
    if not condemned:
        return
    places = {entry.client_index: at for at, entry in enumerate(stage.sent)}
    by_policy: dict[str, dict[int, str]] = {}
    for index, (policy, why) in condemned.items():
        if index in places:  # a declared edit may have dropped it
            by_policy.setdefault(policy, {})[places[index]] = why
    for policy, whys in by_policy.items():
        yield Condemned(policy, whys)


def newly_quarantined(before: Stage, after: Stage) -> Iterator[tuple[int, Quarantined]]:
    """Yield the messages that one policy replaced by stubs, by index in the client's list."""
    if after.demands == before.demands:
        return
    for entry in after.sent:
        place = entry.client_index
        if place is None or not entry.changes or after.demands.get(place) is None:
            continue
        why, change = quarantined_for(entry.message), entry.changes[-1]
        kind, _, cause = change.cause.partition(":")
        if why is not None and kind == POLICY:
            yield place, Quarantined(cause.removesuffix(f":{why}"), why)
