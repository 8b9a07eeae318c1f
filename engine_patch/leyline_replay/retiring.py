"""Turns that no later turn continues: what only they have leaves the cache at once."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from leyline_engine.claims.place import ClaimPlace
from leyline_engine.records.sources import SourceTurn
from leyline_replay.cache.manager import CacheManager
from leyline_replay.cache.radix import Node
from leyline_replay.sequence import Sequence


def retire(
    cache: CacheManager,
    last: SourceTurn,
    turns: Collection[str],
    running: Iterable[Sequence],
    claimed: Iterable[ClaimPlace] = (),
) -> int:
    """Drop retained turns, and free their KV, but for what others have as well.

    Args:
        last: the turn after which the others of its session aren't continued.
        turns: names of those; unknown ones are passed over.
        running: requests that run.
        claimed: the places of claims; the session's own stay.

    Returns:
        Number of slots that left the cache.
    """
    session = (last.scope, last.session)
    before, registry, tree = cache.tree.cached_count(), cache.registry, cache.tree
    gone = [turn for turn in registry.turns(session) if turn.turn in turns and turn is not last]
    for turn in gone:
        registry.drop(session, turn.turn)
    spared = [request.keys() for request in running if request.session == session]
    spared += [place.keys for place in claimed if place.session == session]
    kept: set[Node] = set()
    for keys in (*spared, *(turn.keys() for turn in registry.turns(session))):
        kept.update(tree.path(tree.match(keys).node))
    for turn in gone:
        keys, start = turn.keys(), 0
        for node in reversed(list(tree.path(tree.match(keys).node))):
            if node not in kept and node.owners == {session}:
                cache.lose(keys, start, "retired")
                break
            start += len(node.keys)
    return before - tree.cached_count()
