"""Which key paths each session has published into SGLang's radix tree. Pure, bounded.

SGLang's tree doesn't say who put a node there, and a forget must find all that a session did. So
each session's paths are noted here, one per branch: a path that goes on where another ends takes
its place.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from leyline_engine.contract import LineageRun, common_prefix
from leyline_engine.lineage import runs_before
from leyline_engine.sources import SessionKey

MAX_SESSIONS = 1024
MAX_PATHS = 32
"""Branches noted per session."""


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
        """The first ``length`` keys."""
        return Publication(self.keys[:length], runs_before(self.runs, length), self.space)

    def common(self, other: Publication) -> int:
        """How many leading keys two paths share."""
        return common_prefix(self.keys, other.keys) if self.space == other.space else 0


class Publications:
    """Paths by session, least recently publishing session first."""

    def __init__(self, *, max_sessions: int = MAX_SESSIONS, max_paths: int = MAX_PATHS) -> None:
        self._max_sessions = max_sessions
        self._max_paths = max_paths
        self._paths: OrderedDict[SessionKey, list[Publication]] = OrderedDict()

    def note(self, session: SessionKey, path: Publication) -> tuple[tuple[Publication, int], ...]:
        """A session publishes ``path``.

        Returns:
            Paths that had to go for it, each with the length up to which the session still holds
            it. What is cached behind must not stay, as no forget could find it any more.
        """
        held = self._paths.setdefault(session, [])
        self._paths.move_to_end(session)
        held[:] = [old for old in held if path.common(old) < len(old.keys)]
        if not any(old.common(path) == len(path.keys) for old in held):
            held.append(path)
        gone: list[tuple[Publication, int]] = []
        while len(held) > self._max_paths:
            old = held.pop(0)
            gone.append((old, max(old.common(kept) for kept in held)))
        while len(self._paths) > self._max_sessions:
            _, paths = self._paths.popitem(last=False)
            gone.extend((old, self._reach(old)) for old in paths)
        return tuple(gone)

    def _reach(self, path: Publication) -> int:
        return max((path.common(other) for _, other in self._all()), default=0)

    def _all(self) -> Iterator[tuple[SessionKey, Publication]]:
        for session, paths in self._paths.items():
            for path in paths:
                yield session, path

    def of(self, session: SessionKey) -> tuple[Publication, ...]:
        """What a session has published, earliest first."""
        return tuple(self._paths.get(session, ()))

    def shared(self, session: SessionKey, path: Publication, start: int) -> int:
        """How much of a session's path others have published as well.

        Args:
            start: shorter common parts are of no interest.

        Returns:
            A length of at least ``start``.
        """
        reach = start
        for other, theirs in self._all():
            if reach == len(path.keys):
                break
            # Most paths part much earlier; one key tells.
            if other == session or theirs.keys[reach : reach + 1] != path.keys[reach : reach + 1]:
                continue
            reach = max(reach, path.common(theirs))
        return reach

    def under(
        self, scope: str, lineages: Mapping[str, int]
    ) -> tuple[tuple[SessionKey, Publication, int], ...]:
        """Paths of a tenant under one of ``lineages``.

        Args:
            lineages: by name, the first position that matters.

        Returns:
            (session, path, first position of it that matters).
        """
        found = []
        for session, path in self._all():
            starts = [
                max(run.start, lineages[run.lineage])
                for run in path.runs
                if run.lineage in lineages
            ]
            if session[0] == scope and starts and min(starts) < len(path.keys):
                found.append((session, path, min(starts)))
        return tuple(found)

    def spliced(self, scope: str) -> tuple[tuple[Publication, int], ...]:
        """Paths of a tenant that a splice had a part in, and where each begins to be private."""
        return tuple(
            (path, path.runs[0].start)
            for session, path in self._all()
            if session[0] == scope and path.runs
        )

    def cut(self, session: SessionKey, path: Publication, length: int) -> None:
        """A session holds only the first ``length`` keys of a path any more."""
        held = self._paths.get(session)
        if held is None or path not in held:
            return
        held.remove(path)
        if length:
            self.note(session, path.cut(length))
        elif not held:
            del self._paths[session]

    def clear(self) -> None:
        self._paths.clear()
