"""The manifests of a folder as runs, and runs as manifests. All methods block."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from .codec import decode, encode, max_content
from .folder import ManifestFolder, read_within
from .runs import FileResult, Group, ManifestError, Outcome, Run
from .sealing import OVERHEAD, ManifestSeal
from .selection import select

RAW_FACTOR = 4
"""Tokens of runs in memory, each counted in full, per token that manifests may hold."""


@dataclass(frozen=True, slots=True)
class Written:
    """The content of a manifest on the disk."""

    version: tuple[object, ...] = ()
    """Equal for equal runs; empty if it isn't known which runs the manifest has."""
    sessions: frozenset[str] = frozenset()
    """Sessions that may have a run in it."""

    @classmethod
    def of(cls, runs: Sequence[Run]) -> Written:
        """Return the account of these runs."""
        version = tuple((run.session, run.at, len(run.tokens), run.engine) for run in runs)
        return cls(version, frozenset(run.session for run in runs))


@dataclass(frozen=True, slots=True)
class Loaded:
    """A manifest that was found."""

    name: str
    found: tuple[Group, tuple[Run, ...]] | Outcome
    """Its runs, or the reason that there are none."""


@dataclass(frozen=True, slots=True)
class Change:
    """A manifest after an attempt to change it."""

    group: Group
    result: FileResult
    written: Written | None
    """Its content; None if there is no manifest any more."""


class Manifests:
    """Reads and writes all manifests of one proxy.

    Args:
        max_tokens: of all manifests together, tokens that runs share counted once.
    """

    def __init__(self, folder: ManifestFolder, seal: ManifestSeal, max_tokens: int) -> None:
        self.folder = folder
        self._seal = seal
        self._max_tokens = max_tokens
        self._max_bytes = max_content(max_tokens)

    def load(self, seconds: float) -> list[Loaded]:
        """Return every manifest of the folder, which this process locks.

        Args:
            seconds: time after which no further manifest is read.

        Raises:
            OSError: the folder can't be used.
        """
        self.folder.claim()
        return [Loaded(name, self._read(name, data)) for name, data in self._found(seconds)]

    def look(self, seconds: float) -> tuple[list[Run], int]:
        """Return all runs that the folder holds now, and the number of manifests not read.

        Args:
            seconds: time after which no further manifest is read.

        Raises:
            OSError: the folder can't be read.
        """
        runs: list[Run] = []
        unread = 0
        for name, data in self._found(seconds):
            found = self._read(name, data)
            if isinstance(found, Outcome):
                unread += 1
            else:
                runs += found[1]
        return runs, unread

    def change(
        self, runs: Iterable[Run], written: Mapping[Group, Written], only: Collection[Group] = ()
    ) -> list[Change]:
        """Write manifests that have changed, and remove those without runs.

        Args:
            runs: all runs in memory.
            written: the manifests on the disk.
            only: manifests to change; none means all.
        """
        groups: dict[Group, list[Run]] = defaultdict(list)
        for run in select(runs, self._max_tokens).runs:
            groups[run.group].append(run)
        wanted = only or {*groups, *written}
        changes = [self._changed(each, groups.get(each, []), written.get(each)) for each in wanted]
        return [change for change in changes if change is not None]

    def remove(self, name: str) -> FileResult:
        """Delete a manifest that gives no runs: no forget could reach what it holds."""
        return self.folder.remove(name)

    def _changed(self, group: Group, runs: Sequence[Run], old: Written | None) -> Change | None:
        name = self._seal.name(group)
        if not runs:
            if old is None:
                return None
            result = self.folder.remove(name)
            return Change(group, result, old if result is FileResult.LEFT else None)
        new = Written.of(runs)
        if old is not None and old.version == new.version:
            return None
        data = self._seal.close(encode(group, runs, self._max_bytes), group)
        if old is None or old.sessions <= new.sessions:
            result = self.folder.write(name, data)
            # A write that failed late has replaced the file all the same.
            either = Written((), new.sessions)
            return Change(group, result, new if result is FileResult.WRITTEN else either)
        result = self.folder.replace_or_remove(name, data)
        after = {FileResult.WRITTEN: new, FileResult.LEFT: old}
        return Change(group, result, after.get(result))

    def _found(self, seconds: float) -> list[tuple[str, bytes | Outcome]]:
        return list(read_within(self.folder, seconds))

    def _read(self, name: str, data: bytes | Outcome) -> tuple[Group, tuple[Run, ...]] | Outcome:
        if isinstance(data, Outcome):
            return data
        try:
            content = self._seal.open(data, name)
            most = RAW_FACTOR * self._max_tokens
            group, runs = decode(content, max_bytes=self._max_bytes, max_tokens=most)
            self._seal.check(group, name)
        except ManifestError as error:
            return error.outcome
        return group, runs


def max_manifest(max_tokens: int) -> int:
    """Return the largest number of bytes of one manifest on the disk."""
    return max_content(max_tokens) + OVERHEAD + 4096  # text that can't be compressed grows
