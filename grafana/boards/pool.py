"""The KV pool's slots by owner, a panel of two boards; and the colour of reuse."""

from __future__ import annotations

from grafana_foundation_sdk.builders import timeseries
from panels import Query, time_series
from queries import BY_INSTANCE, total

POOL = "leyline_engine_pool_tokens"
CAPACITY = "leyline_engine_pool_capacity_tokens"

REUSED = "#CC79A7"
"""Colour of tokens that were reused, as on the live page."""

_OWNERS = {
    "claimed": "purple",
    "in_flight": "orange",
    "spliced": "blue",
    "exact": "green",
    "free": "text",
}
"""Owners with their colours, from the least to the most available."""


_STATES = {"used": "blue", "free": "text"}


def states_by_owner() -> timeseries.Panel:
    """Return the slots of recurrent states, stacked."""
    return time_series(
        "Recurrent states",
        "Slots of recurrent states, used and free; none on models without recurrent layers. "
        "Bad: no free ones, so that edits of old messages find no anchor.",
        [
            Query(total("leyline_engine_state_slots", f'owner="{owner}",{BY_INSTANCE}'), owner)
            for owner in _STATES
        ],
        unit="short",
        stacked=True,
        colors=_STATES,
    )


def pool_by_owner() -> timeseries.Panel:
    """Return the slots, stacked up to the capacity."""
    return time_series(
        "Pool by owner",
        "Slots of the KV pool: claimed, in flight (of running requests), spliced and exact cache, "
        "free. They sum to the capacity. Bad: claimed and in flight leave no room for a cache.",
        [Query(total(POOL, f'owner="{owner}",{BY_INSTANCE}'), owner) for owner in _OWNERS],
        unit="short",
        stacked=True,
        colors=_OWNERS,
    )
