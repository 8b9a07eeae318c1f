"""The pieces of a session by address, tag and tool.

A piece has a *key*: its address, or the index in the client's list of a message without text. An
evicted message belongs to the piece that its stub names. So equal texts are one piece, and so are
the messages that one stub replaces.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence

from ..model.parts import PartFacts
from ..model.working_set import (
    FORBIDDEN,
    ContextPiece,
    PieceCatalogue,
    PieceCause,
    Selector,
    Treatment,
)

Key = str | int


class PieceIndex:
    """Finds pieces.

    Args:
        recall: False if the tenant has no recall: nothing of the store is then found.
    """

    def __init__(self, catalogue: PieceCatalogue, *, recall: bool) -> None:
        stored = catalogue.parts if recall and catalogue.problem is None else ()
        self.parts = {facts.address: facts for facts in stored}
        self.forgotten = catalogue.forgotten
        self._messages: dict[Key, list[ContextPiece]] = defaultdict(list)
        self._runs: dict[str, str] = {}
        self._named: dict[tuple[str, str], list[ContextPiece | PartFacts]] = defaultdict(list)
        for facts in self.parts.values():
            self._name(facts)
        for message in catalogue.messages:
            self._name(message)
            self._messages[key_of(message)].append(message)
            if message.part is not None and message.address is not None:
                self._runs[message.address] = message.part
        texts = {each.address for each in catalogue.messages if each.address is not None}
        keys = {key for key in self._messages if isinstance(key, str)}
        self._addresses = sorted(texts | keys | self.parts.keys() | self.forgotten)

    def _name(self, facts: ContextPiece | PartFacts) -> None:
        for tag in dict.fromkeys(facts.tags):
            self._named["tag", tag].append(facts)
        if facts.tool:
            self._named["tool", facts.tool].append(facts)

    def messages(self, key: Key) -> Sequence[ContextPiece]:
        """Return the messages of a piece, in the client's order."""
        return self._messages.get(key, ())

    def addressed(self, prefix: str) -> list[str]:
        """Return the addresses that begin with ``prefix``: none, one, or two of several."""
        first = bisect_left(self._addresses, prefix)
        return [each for each in self._addresses[first : first + 2] if each.startswith(prefix)]

    def key_of_address(self, address: str) -> Key:
        """Return the key of the piece that holds a text.

        A message within a run that one stub replaces comes back with the run only.
        """
        if address in self._messages:
            return address
        return self._runs.get(address, address)

    def named(self, selector: Selector) -> Iterator[Key]:
        """Yield the keys of pieces with a tag or of a tool, newest first, each once.

        Messages of the client's list are newer than what only the store has.
        """
        found = self._named.get((selector.kind, selector.value), ())
        yield from dict.fromkeys(
            key_of(each) if isinstance(each, ContextPiece) else self.key_of_address(each.address)
            for each in reversed(found)
        )

    def to_restore(self, key: Key) -> Sequence[ContextPiece]:
        """Return the newest evicted messages that together are the piece; none if there are none.

        Those are one message with this very text, or the run of neighbours that one stub replaces.
        """
        evicted = [each for each in self.messages(key) if each.treatment is Treatment.EVICTED]
        run: list[ContextPiece] = []
        for message in reversed(evicted):
            if not run:
                run = [message]
            elif message.client_index != run[-1].client_index - 1 or _is_whole_text(message):
                break
            else:
                run.append(message)
            if _is_whole_text(message):
                break
        return run[::-1]

    def forbidden(self, key: Key) -> PieceCause | None:
        """Return the reason that a piece must not come back; None if it may.

        A text is in quarantine, or to be forgotten, wherever it occurs: in another message, too,
        and in a run.
        """
        texts: set[Key] = {key, *(each.address for each in self.messages(key) if each.address)}
        treatments = {each.treatment for text in texts for each in self.messages(text)}
        if Treatment.QUARANTINED in treatments:
            return PieceCause.QUARANTINED
        if treatments & FORBIDDEN or texts & self.forgotten:
            return PieceCause.FORGOTTEN
        return None


def key_of(message: ContextPiece) -> Key:
    """Return the key of the piece that a message belongs to."""
    if message.part is not None:
        return message.part
    return message.client_index if message.address is None else message.address


def _is_whole_text(message: ContextPiece) -> bool:
    """Return True if the stub's address is that of the message's own text."""
    return message.address == message.part
