"""Key paths that each session has published into SGLang's radix tree. Pure, bounded.

SGLang's tree doesn't know who added a node, and a forget must find all that a session published. So
each session's paths are noted here, one per branch: a path that continues another replaces it.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from leyline_engine.contract import LineageRun, common_prefix
from leyline_engine.ledger import LineageKey
from leyline_engine.lineage import MAX_TOKEN, runs_before
from leyline_engine.sources import SessionKey

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
_SPARE = 32
"""Share of the bound that is freed at once: one part in so many."""


class Space(NamedTuple):
    """SGLang's namespace of a key; equal keys of two namespaces share nothing."""

    extra_key: str | None = None
    cache_salt: str | None = None


@dataclass(frozen=True, slots=True)
class Publication:
    """A path from the root: its radix keys, and the lineage map folded into them."""

    keys: array[int]
    runs: tuple[LineageRun, ...] = ()
    space: Space = Space()  # noqa: RUF009 - immutable

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
        common: returns the number of leading keys by which two paths find the same slots.
    """

    def __init__(
        self,
        *,
        max_tokens: int = MIN_TOKENS,
        max_paths: int = MAX_PATHS,
        cached: Callable[[Publication], int] = lambda path: len(path.keys),
        common: Callable[[array[int], array[int]], int] = common_prefix,
    ) -> None:
        self._max_tokens = max_tokens
        self._max_paths = max_paths
        self._cached = cached
        self._common = common
        self._tenants: dict[str, OrderedDict[SessionKey, list[Publication]]] = {}
        self._weights: Counter[str] = Counter()

    def common(self, path: Publication, other: Publication) -> int:
        """Return the number of leading keys that two paths share."""
        return self._common(path.keys, other.keys) if path.space == other.space else 0

    def note(self, session: SessionKey, path: Publication) -> tuple[tuple[Publication, int], ...]:
        """Note that a session publishes ``path``.

        Returns:
            Paths that were dropped for it, each with the length up to which somebody still holds
            it. The cached part after that must not stay, as no forget could find it any more.
        """
        held = self._tenants.setdefault(session[0], OrderedDict()).setdefault(session, [])
        self._tenants[session[0]].move_to_end(session)
        before = _weight(held)
        held[:] = [old for old in held if self.common(path, old) < len(old.keys)]
        if not any(self.common(old, path) == len(path.keys) for old in held):
            held.append(path)
        gone: list[Publication] = []
        while len(held) > self._max_paths:
            gone.append(held.pop(0))
        self._count(session[0], _weight(held) - before)
        if self.tokens > self._max_tokens:
            gone.extend(self._make_room(session, path))
        return tuple((old, self.shared(None, old, 0)) for old in gone)

    @property
    def tokens(self) -> int:
        """Number of tokens, on which the bound is."""
        return self._weights.total()

    def _make_room(self, session: SessionKey, path: Publication) -> list[Publication]:
        """Stay well below the bound, so that this isn't done for each path.

        Args:
            session: the session that publishes ``path``, which stays.

        Returns:
            Dropped paths that may be cached in part.
        """
        enough = self._max_tokens - self._max_tokens // _SPARE
        gone: list[Publication] = []
        trimmed: set[str] = set()
        while self.tokens > enough:
            heaviest = [scope for scope, _ in self._weights.most_common()]
            if heaviest[0] not in trimmed:
                trimmed.add(heaviest[0])
                self._trim(heaviest[0], session)
                continue
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

    def _count(self, scope: str, more: int) -> None:
        self._weights[scope] += more
        if not self._tenants[scope]:
            del self._tenants[scope], self._weights[scope]

    def _trim(self, scope: str, publishing: SessionKey) -> None:
        """Cut a tenant's paths to their cached parts; KV about to be published isn't cached yet."""
        for session in [each for each in self._tenants[scope] if each != publishing]:
            for path in self.of(session):
                length = self._cached(path)
                if length < len(path.keys):
                    self.cut(session, path, length)

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
        reach = start
        for other, theirs in self.all():
            if reach == len(path.keys):
                break
            if other != session and other[0] != NOBODY and _pass(path, theirs, reach):
                reach = max(reach, self.common(path, theirs))
        return reach

    def strangers(
        self, path: Publication, start: int
    ) -> tuple[tuple[SessionKey, Publication], ...]:
        """Return paths of requests without a session that share more than ``start`` keys."""
        return tuple(
            (owner, theirs)
            for owner, theirs in self._of_tenant(NOBODY)
            if _pass(path, theirs, start) and self.common(path, theirs) > start
        )

    def under(
        self, lineages: Mapping[LineageKey, int]
    ) -> tuple[tuple[SessionKey, Publication, int], ...]:
        """Return the paths under one of ``lineages``.

        Args:
            lineages: the first position that matters of each.

        Returns:
            (session, path, first position of it that matters).
        """
        found = []
        for scope in dict.fromkeys(scope for scope, _ in lineages):
            for session, path in self._of_tenant(scope):
                starts = [
                    max(run.start, lineages[scope, run.lineage])
                    for run in path.runs
                    if (scope, run.lineage) in lineages
                ]
                if starts and min(starts) < len(path.keys):
                    found.append((session, path, min(starts)))
        return tuple(found)

    def spliced(self, scope: str) -> tuple[tuple[Publication, int], ...]:
        """Return a tenant's paths with spliced parts, and where each begins to be private."""
        return tuple((path, path.runs[0].start) for _, path in self._of_tenant(scope) if path.runs)

    def cut(self, session: SessionKey, path: Publication, length: int) -> None:
        """Note that a session holds only the first ``length`` keys of a path any more."""
        held = self._tenants.get(session[0], OrderedDict()).get(session)
        if held is None or path not in held:
            return
        before = _weight(held)
        held.remove(path)
        kept = path.cut(length)
        if length and not any(self.common(old, kept) == length for old in held):
            held.append(kept)
        change = _weight(held) - before
        if not held:
            del self._tenants[session[0]][session]
        self._count(session[0], change)

    def clear(self) -> None:
        self._tenants.clear()
        self._weights.clear()


def _pass(path: Publication, other: Publication, start: int) -> bool:
    """Return True if two paths may have more than ``start`` keys in common.

    Most part much earlier, which one key's token shows.
    """
    shorter = min(len(path.keys), len(other.keys))
    return start < shorter and (path.keys[start] ^ other.keys[start]) & MAX_TOKEN == 0


def _weight(paths: Iterable[Publication]) -> int:
    return sum(max(MIN_WEIGHT, len(path.keys)) for path in paths)
