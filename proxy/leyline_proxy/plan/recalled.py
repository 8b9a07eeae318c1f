"""Places of recalled texts in a prompt. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from ..edits.asides import CHANGE
from ..model.working_set import Extent
from .planning import Planned


def places_of(planned: Planned) -> Mapping[int, Extent]:
    """Return the places in a turn's prompt, by index in the list that is sent."""
    spans = planned.rendered.spans if planned.rendered is not None else ()
    return {span.message: (span.start, span.end) for span in spans}


def recalled_extents(planned: Planned) -> tuple[Extent, ...]:
    """Return the places of texts that a recall put back, ascending.

    They are results of asides, and messages with a reference.
    """
    places = places_of(planned)
    return tuple(
        places[at]
        for at, entry in enumerate(planned.prepared.sent)
        if at in places and CHANGE in entry.changes and entry.message.get("role") != "assistant"
    )
