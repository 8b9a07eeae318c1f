"""Key paths that each session has published into an engine's prefix cache. Pure, bounded.

The cache doesn't know who added an entry, and a forget must find all that a session published. So
each session's paths are noted here, one per branch: a path that continues another replaces it.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from leyline_engine.contract import LineageRun
from leyline_engine.records.keys import shared_length
from leyline_engine.records.ledger import LineageKey
from leyline_engine.records.lineage import runs_before
from leyline_engine.records.path_tree import PathTree
from leyline_engine.records.sources import SessionKey, SourceTurn

MAX_PATHS = 32
"""Maximum number of branches noted per session."""
MIN_TOKENS = 1 << 20
"""A bound that is small on any machine a model fits: a token takes eight bytes."""
MIN_WEIGHT = 64
"""Memory of a path of a single token, in tokens of eight bytes."""
PER_SLOT = 32
"""Tokens noted for each slot of the pool: so often may a prefix be shared before a path is dropped.
Sessions of single tokens fill the pool before they fill this."""
NOBODY = ""
"""Scope of paths that requests without a session published. It spares nothing: if a session
forgets, their continuations of its KV are removed, too."""
_SPARE = 4
"""Share of the bound from which on paths are cut to what is cached: all but one part in so many."""
_LOOKS = 4
"""Keys of paths that are looked at for each key that is noted, while there are many."""


class Space(NamedTuple):
    """Namespace of a key; equal keys of two namespaces share nothing."""

    extra_key: str | None = None
    cache_salt: str | None = None


@dataclass(frozen=True, slots=True)
class Publication:
    """A path from the root: its radix keys, and the lineage map folded into them."""

    keys: array[int]
    runs: tuple[LineageRun, ...] = ()
    space: Space = Space()  # noqa: RUF009 - immutable

    @classmethod
    def of_turn(cls, turn: SourceTurn) -> Publication:
        """Return the path of a retained turn."""
        return cls(turn.keys(), turn.lineage, Space(turn.extra_key, turn.cache_salt))

    def cut(self, length: int) -> Publication:
        """Return the first ``length`` keys."""
        return Publication(self.keys[:length], runs_before(self.runs, length), self.space)


class Publications:
    """Paths by tenant and session, a tenant's least recently publishing session first.

    The bound is on tokens, and the tenant that has noted most loses paths: first those that aren't
    cached any more, then those of the sessions that published least recently.

    Args:
        max_tokens: tokens of all paths together; each counts as :data:`MIN_WEIGHT` at least.
        max_paths: maximum number of branches noted per session.
        cached: returns the cached length of a path.
        shifted: returns keys with each slot's lineage where the tree looks for it.
    """

    def __init__(
        self,
        *,
        max_tokens: int = MIN_TOKENS,
        max_paths: int = MAX_PATHS,
        cached: Callable[[Publication], int] = lambda path: len(path.keys),
        shifted: Callable[[array[int]], array[int]] = lambda keys: keys,
    ) -> None:
        self._max_tokens = max_tokens
        self._max_paths = max_paths
        self._cached = cached
        self._shifted = shifted
        self._tenants: dict[str, OrderedDict[SessionKey, list[Publication]]] = {}
        self._weights: Counter[str] = Counter()
        self._trees: dict[tuple[bool, Space], PathTree[SessionKey, Publication]] = {}
        """By namespace, sessions' paths (True) and those of requests without one (False)."""
        self._spliced: dict[LineageKey, dict[int, tuple[SessionKey, Publication]]] = {}
        """Paths under a lineage, by identity."""
        self._unseen: dict[str, deque[SessionKey]] = {}
        """Sessions whose paths a tenant's present round of trimming hasn't looked at."""

    @classmethod
    def of_tree(cls, tree: Any, usable: int) -> Publications:
        """Return an empty record of what is published in a tree of so many slots."""
        return cls(
            max_tokens=max(MIN_TOKENS, PER_SLOT * usable),
            cached=lambda path: tree.tree_keys.keys_of(tree.slot_count(path)),
            shifted=tree.tree_keys.shifted,
        )

    def common(self, path: Publication, other: Publication) -> int:
        """Return the number of leading keys that two paths share."""
        if path.space != other.space:
            return 0
        return shared_length(self._shifted(path.keys), self._shifted(other.keys))

    def note(self, session: SessionKey, path: Publication) -> tuple[tuple[Publication, int], ...]:
        """Note that a session publishes ``path``.

        Returns:
            Paths that were dropped for it, each with the length up to which somebody still holds
            it. The cached part after that must not stay, as no forget could find it any more.
        """
        held = self._tenants.setdefault(session[0], OrderedDict()).setdefault(session, [])
        self._tenants[session[0]].move_to_end(session)
        begun, covered = self._beginnings(session, path)
        same = [old for old in begun if len(old.keys) == len(path.keys)]
        if not covered or same:
            self._add(session, held, path)
        for old in begun:
            self._discard(session, held, old)
        gone: list[Publication] = []
        while len(held) > self._max_paths:
            gone.append(held[0])
            self._discard(session, held, held[0])
        if self.tokens > self._max_tokens - self._max_tokens // _SPARE:
            gone.extend(self._make_room(session, path))
        return tuple((old, self.shared(None, old, 0)) for old in gone)

    def _beginnings(self, session: SessionKey, path: Publication) -> tuple[list[Publication], bool]:
        tree = self._trees.get(_place(session, path))
        return ([], False) if tree is None else tree.beginnings(session, self._shifted(path.keys))

    def _add(self, session: SessionKey, held: list[Publication], path: Publication) -> None:
        held.append(path)
        tree = self._trees.setdefault(_place(session, path), PathTree())
        tree.add(session, self._shifted(path.keys), path)
        for run in path.runs:
            under = self._spliced.setdefault((session[0], run.lineage), {})
            under[id(path)] = (session, path)
        self._weights[session[0]] += _weight(path)

    def _discard(self, session: SessionKey, held: list[Publication], path: Publication) -> None:
        del held[next(at for at, old in enumerate(held) if old is path)]
        tree = self._trees[_place(session, path)]
        tree.remove(session, path)
        if not tree:
            del self._trees[_place(session, path)]
        for name in dict.fromkeys((session[0], run.lineage) for run in path.runs):
            del self._spliced[name][id(path)]
            if not self._spliced[name]:
                del self._spliced[name]
        self._weights[session[0]] -= _weight(path)

    @property
    def tokens(self) -> int:
        """Number of tokens, on which the bound is."""
        return self._weights.total()

    def _make_room(self, session: SessionKey, path: Publication) -> list[Publication]:
        """Keep below the bound, at an expense that ``path`` alone decides.

        Args:
            session: the session that publishes ``path``, which stays.

        Returns:
            Dropped paths that may be cached in part.
        """
        gone: list[Publication] = []
        looks = _LOOKS * max(len(path.keys), MIN_WEIGHT * self._max_paths)
        heaviest = [scope for scope, _ in self._weights.most_common()]
        self._trim(heaviest[0], session, looks)
        while self.tokens > self._max_tokens:
            heaviest = [scope for scope, _ in self._weights.most_common()]
            found = next(filter(None, (self._oldest(s, session, path) for s in heaviest)), None)
            if found is None:
                break
            self.cut(*found, 0)
            gone.append(found[1])
        return gone

    def _oldest(
        self, scope: str, session: SessionKey, path: Publication
    ) -> tuple[SessionKey, Publication] | None:
        """Return a tenant's most dispensable path; none that covers ``session``'s ``path``."""
        for owner, old in self._of_tenant(scope):
            if owner != session:
                return owner, old
        for old in self.of(session) if session[0] == scope else ():
            if self.common(old, path) < len(path.keys):
                return session, old
        return None

    def _trim(self, scope: str, publishing: SessionKey, keys: int) -> None:
        """Cut paths of a tenant to their cached parts; KV about to be published isn't cached yet.

        Args:
            keys: keys of the paths that are looked at; the next call continues after them.
        """
        unseen = self._unseen.setdefault(scope, deque())
        if not unseen:
            unseen.extend(self._tenants[scope])
        while unseen and keys > 0:
            session = unseen.popleft()
            for path in self.of(session) if session != publishing else ():
                keys -= max(MIN_WEIGHT, len(path.keys))
                length = self._cached(path)
                if length < len(path.keys):
                    self.cut(session, path, length)
        if not unseen:
            self._unseen.pop(scope, None)

    def all(self) -> Iterator[tuple[SessionKey, Publication]]:
        """Yield every path with its session."""
        for scope in self._tenants:
            yield from self._of_tenant(scope)

    def _of_tenant(self, scope: str) -> Iterator[tuple[SessionKey, Publication]]:
        for session, paths in self._tenants.get(scope, {}).items():
            for path in paths:
                yield session, path

    def of(self, session: SessionKey) -> tuple[Publication, ...]:
        """Return the paths that a session has published, earliest first."""
        return tuple(self._tenants.get(session[0], OrderedDict()).get(session, ()))

    def shared(self, session: SessionKey | None, path: Publication, start: int) -> int:
        """Return the length of a path that sessions other than ``session`` have published as well.

        Args:
            start: shorter common parts are of no interest.

        Returns:
            A length of at least ``start``.
        """
        tree = self._trees.get((True, path.space))
        if tree is None:
            return start
        if path in tree:
            return max(start, tree.reach_of(path, session))
        return max(start, tree.reach(self._shifted(path.keys), session))

    def agreed(
        self, session: SessionKey, kept: Sequence[Publication]
    ) -> Iterator[tuple[Publication, int]]:
        """Yield a session's paths, each with how many leading keys any of ``kept`` has, too."""
        for place, paths in _by_place((session, path) for path in self.of(session)).items():
            same = [self._shifted(other.keys) for other in kept if other.space == place[1]]
            yield from zip(paths, self._trees[place].agreed(paths, same), strict=True)

    def repeated(self, paths: Iterable[tuple[SessionKey, Publication]]) -> dict[int, int]:
        """Return how many leading keys of each path an earlier one has, by the path's identity.

        Args:
            paths: sessions and paths of theirs; one that comes twice has new keys the first time.
        """
        once = {id(path): (session, path) for session, path in paths}
        return {
            id(path): known
            for place, same in _by_place(once.values()).items()
            for path, known in zip(same, self._trees[place].repeated(same), strict=True)
        }

    def strangers(
        self, path: Publication, start: int
    ) -> tuple[tuple[SessionKey, Publication], ...]:
        """Return paths of requests without a session that share more than ``start`` keys."""
        tree = self._trees.get((False, path.space))
        return () if tree is None else tuple(tree.beyond(self._shifted(path.keys), start))

    def under(
        self, lineages: Mapping[LineageKey, int]
    ) -> tuple[tuple[SessionKey, Publication, int], ...]:
        """Return the paths under one of ``lineages``.

        Args:
            lineages: the first position that matters of each.

        Returns:
            (session, path, first position of it that matters).
        """
        paths = {
            key: found for name in lineages for key, found in self._spliced.get(name, {}).items()
        }
        found = []
        for session, path in paths.values():
            first = min(
                max(run.start, lineages[session[0], run.lineage])
                for run in path.runs
                if (session[0], run.lineage) in lineages
            )
            if first < len(path.keys):
                found.append((session, path, first))
        return tuple(found)

    def spliced(self, scope: str) -> tuple[tuple[Publication, int], ...]:
        """Return a tenant's paths with spliced parts, and where each begins to be private."""
        return tuple((path, path.runs[0].start) for _, path in self._of_tenant(scope) if path.runs)

    def cut(self, session: SessionKey, path: Publication, length: int) -> None:
        """Note that a session holds only the first ``length`` keys of a path any more."""
        held = self._tenants.get(session[0], OrderedDict()).get(session)
        same = next((old for old in held or () if old is path), None)
        found = same or next((old for old in held or () if old == path), None)
        if held is None or found is None:
            return
        self._discard(session, held, found)
        kept = found.cut(length)
        if length and not self._beginnings(session, kept)[1]:
            self._add(session, held, kept)
        if not held:
            del self._tenants[session[0]][session]
            if not self._tenants[session[0]]:
                del self._tenants[session[0]], self._weights[session[0]]
                self._unseen.pop(session[0], None)

    def clear(self) -> None:
        self._tenants.clear()
        self._weights.clear()
        self._trees.clear()
        self._spliced.clear()
        self._unseen.clear()


def _place(session: SessionKey, path: Publication) -> tuple[bool, Space]:
    """Return the tree that has a session's path."""
    return session[0] != NOBODY, path.space


def _by_place(
    paths: Iterable[tuple[SessionKey, Publication]],
) -> dict[tuple[bool, Space], list[Publication]]:
    """Return sessions' paths by their trees."""
    found: dict[tuple[bool, Space], list[Publication]] = {}
    for session, path in paths:
        found.setdefault(_place(session, path), []).append(path)
    return found


def _weight(path: Publication) -> int:
    return max(MIN_WEIGHT, len(path.keys))
