"""An index of message contents: the retained turns of a tenant's sessions that hold each.

It lets the engine find a text that another session of the tenant has sent before. It holds keyed
hashes and places, no text, and only what this process has seen: a restart empties it, which costs
hints and no more. A hash is over the tokens of a content, not over its message: two agents that
read the same file get it under different ids of tool calls.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from secrets import randbits
from typing import NamedTuple

import xxhash

from leyline_engine.contract import SourceRef

from ..model.rendered import MessageSpan, Rendered
from ..model.session import RetainedTurn, Session

MIN_CONTENT = 16
"""Shortest content that is worth a place, in tokens; engines copy nothing shorter."""
MAX_PLACES = 65_536
"""Places of all tenants together; of more, the tenant with the most loses its oldest session's."""
MAX_HOLDERS = 8
"""Sessions that are known to hold one content; the latest are."""
MAX_TENANTS = 1024
"""Tenants that are indexed; those that asked least recently are dropped first."""


class ContentPlace(NamedTuple):
    """Tokens ``[start, end)`` of a session's retained turn hold a content."""

    source: SourceRef
    """The turn, with its session; its digest isn't sealed."""
    start: int
    end: int


@dataclass(slots=True)
class _Contents:
    """The places of one tenant."""

    by_session: OrderedDict[str, dict[int, ContentPlace]] = field(default_factory=OrderedDict)
    """Places by key, of the session that was updated least recently first."""
    by_key: dict[int, dict[str, ContentPlace]] = field(default_factory=dict)
    """Places by session, oldest first."""
    size: int = 0

    def enter(self, session: str, key: int, place: ContentPlace) -> None:
        """Add a place, or replace the session's earlier one of the same content."""
        holders = self.by_key.setdefault(key, {})
        if holders.pop(session, None) is None:
            self.size += 1
        holders[session] = place
        self.by_session.setdefault(session, {})[key] = place
        if len(holders) > MAX_HOLDERS:
            self.remove(next(iter(holders)), key)

    def remove(self, session: str, key: int) -> None:
        """Remove a place."""
        held = self.by_session[session]
        del held[key]
        if not held:
            del self.by_session[session]
        holders = self.by_key[key]
        del holders[session]
        if not holders:
            del self.by_key[key]
        self.size -= 1

    def drop(self, session: str) -> None:
        """Remove a session's places."""
        for key in tuple(self.by_session.get(session, ())):
            self.remove(session, key)


class ContentIndex:
    """Places of contents by tenant and by run of an engine.

    Only tenants that ask for reuse are indexed, from their first such turn on.

    Args:
        max_places: see :data:`MAX_PLACES`.
    """

    def __init__(self, *, max_places: int = MAX_PLACES) -> None:
        self._max_places = max_places
        self._seed = randbits(64)
        self._tenants: OrderedDict[str, _Contents] = OrderedDict()

    def __len__(self) -> int:
        return sum(contents.size for contents in self._tenants.values())

    def note(self, tenant: str) -> None:
        """Note that a tenant asks for reuse."""
        self._tenants.setdefault(tenant, _Contents())
        self._tenants.move_to_end(tenant)
        if len(self._tenants) > MAX_TENANTS:
            self._tenants.popitem(last=False)

    def put(self, session: Session) -> None:
        """Replace a session's places: those in turns that it retains no more, and by those of its
        latest turn. Sessions of a tenant that never asked for reuse are left out."""
        contents = self._tenants.get(session.tenant)
        if contents is None:
            return
        retained = {turn.turn for turn in session.turns}
        held = contents.by_session.get(session.id, {})
        for key in [key for key, place in held.items() if place.source.turn not in retained]:
            contents.remove(session.id, key)
        if session.last is not None:
            for key, place in self._places_in(session.id, session.last):
                contents.enter(session.id, key, place)
        if session.id in contents.by_session:
            contents.by_session.move_to_end(session.id)
        while len(self) > self._max_places:
            most = max(self._tenants.values(), key=lambda each: each.size)
            most.drop(next(iter(most.by_session)))

    def drop(self, tenant: str, session_id: str) -> None:
        """Remove a session's places at once."""
        contents = self._tenants.get(tenant)
        if contents is not None:
            contents.drop(session_id)

    def held(self, tenant: str, session_id: str) -> tuple[int, int]:
        """Return the number of a tenant's places, and of those in a session's turns."""
        contents = self._tenants.get(tenant)
        holders = contents.by_key.values() if contents is not None else ()
        found = [(name, place.source.session) for each in holders for name, place in each.items()]
        return len(found), sum(session_id in names for names in found)

    def places(
        self, tenant: str, run: str, prompt: Rendered, span: MessageSpan
    ) -> list[ContentPlace]:
        """Return the places that have the content of a prompt's message, latest first.

        Args:
            run: the engine's; see ``UpstreamStatus.retains_as``. Other engines' turns are no use.
        """
        contents = self._tenants.get(tenant)
        if contents is None:
            return []
        key = self._key(run, prompt, span)
        return list(reversed(contents.by_key.get(key, {}).values()))

    def _places_in(self, session: str, turn: RetainedTurn) -> Iterator[tuple[int, ContentPlace]]:
        """Yield the contents of a turn's prompt, each at its first place."""
        if not turn.rendered.tokens:
            return  # its engine retains nothing
        source = SourceRef(turn.turn, len(turn.tokens), turn.digest, session)
        seen: set[int] = set()
        for span in long_contents(turn.rendered.spans):
            key = self._key(turn.model_fingerprint, turn.rendered, span)
            if key not in seen:
                seen.add(key)
                yield key, ContentPlace(source, span.start, span.end)

    def _key(self, run: str, prompt: Rendered, span: MessageSpan) -> int:
        """Return the keyed hash of a content in an engine's run."""
        seed = xxhash.xxh3_64_intdigest(run.encode(), self._seed)
        view = memoryview(prompt.tokens)[span.start : span.end]
        return int(xxhash.xxh3_64_intdigest(view.cast("B"), seed))


def long_contents(spans: Sequence[MessageSpan]) -> Iterator[MessageSpan]:
    """Yield the contents that are long enough to have a place."""
    return (span for span in spans if span.end - span.start >= MIN_CONTENT)
