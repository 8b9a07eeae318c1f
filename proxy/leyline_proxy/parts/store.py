"""The store of evicted texts: its rules, over a space that keeps its entries."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

from ..model.parts import Barred, FoundParts, PartFacts, StoredPart
from .limits import FLOOR_S, MAX_LISTED, MAX_PARTS, Owner, PartLimits, PartStoreError
from .marks import Mark, WrittenMark, barring, joined, reached, with_forgotten
from .names import MARK, TEXT, Shelf, kind_of, mark_name, millis, tag_of, text_name, time_of
from .sealing import HEAD_BYTES, PartSeal, head_end
from .space import PartUsage, Space, SpaceError

_MARKS_SHARE = 4
"""A tenant's marks may take this part of the bytes of its texts, beside them."""

_LOOKS = 3
"""Looks for a text that is being renewed."""

_GRACE_S = 60.0
"""Age at which a mark may go that another one replaces: a listing of files that is under way may
see neither of the two."""

_OPENED_AT_ONCE = 64
"""Facts that are decrypted before other work may go on."""

Place = tuple[Shelf, str]
"""Shelf and name of an entry."""


@dataclass(frozen=True, slots=True)
class _Contents:
    """The entries of one session."""

    texts: Sequence[Place]
    """Live texts, oldest first."""
    expired: Sequence[Place]
    marks: Mapping[Place, WrittenMark]

    def reaches(self, facts: PartFacts, put_at: float) -> bool:
        """Return True if any mark reaches a text."""
        return reached(self.marks.values(), facts, put_at)

    @property
    def barred(self) -> Barred:
        """The addresses that the marks bar."""
        marks = [each.mark for each in self.marks.values() if each.mark is not None]
        return Barred(
            frozenset().union(*(mark.barred for mark in marks)),
            any(mark.closed for mark in marks),
            bool(self.marks),
        )


class PartStore:
    """A bounded store of evicted texts, fair among tenants, over a space that keeps its entries.

    A text belongs to a session of a tenant. Another session, or another tenant, doesn't find it,
    even by the right address.

    Args:
        failed: called with the operation that failed, for metrics.
    """

    def __init__(
        self,
        space: Space,
        seal: PartSeal,
        limits: PartLimits,
        *,
        clock: Callable[[], float] = time.time,
        failed: Callable[[str], object] = lambda _: None,
    ) -> None:
        self._space = space
        self._seal = seal
        self._limits = limits
        self._clock = clock
        self._failed = failed

    @property
    def name(self) -> str:
        """Kind of the store: ``memory``, ``redis`` or ``files``."""
        return self._space.name

    @property
    def problem(self) -> str | None:
        """The reason that the store can't be used now, for ``/readyz``; None if it can."""
        return self._space.problem

    @property
    def usage(self) -> PartUsage:
        """The contents in this process; none if they are kept elsewhere."""
        return self._space.usage

    async def check(self) -> None:
        """Find out if the store can be used, for :attr:`problem`. Never raises."""
        await self._space.check()

    async def tidy(self) -> None:
        """Remove what has expired. Never raises."""
        ttl_s, now = self._limits.ttl_s, self._clock()
        before = {TEXT: millis(now - ttl_s), MARK: millis(now - ttl_s - FLOOR_S)}
        with suppress(PartStoreError), self._doing("tidy"):
            await self._space.tidy(before)

    async def put(self, owner: Owner, parts: Sequence[StoredPart]) -> None:
        """Store texts, or renew those that are stored already.

        Texts of turns that a forget reaches (see :meth:`forget`) are left out. Texts that exceed
        the store's limits take the place of their tenant's oldest, or are left out.

        Raises:
            PartStoreError: nothing, or not everything, was stored.
        """
        with self._doing("put"):
            await self._put(owner, parts)

    async def _put(self, owner: Owner, parts: Sequence[StoredPart]) -> None:
        now, shelf = self._clock(), self._seal.shelves(owner)[0]
        before = await self._look(owner)
        latest = {part.address: part for part in parts if not before.reaches(part, now)}
        entries: dict[str, bytes] = {}
        written: dict[str, StoredPart] = {}
        for part in list(latest.values())[-MAX_PARTS:]:
            name = text_name(self._seal.tags(owner, part.address)[0], now)
            entry = self._seal.close_part(owner, name, part)
            if len(entry) <= min(self._limits.part_bytes, self._limits.tenant_bytes):
                entries[name], written[name] = entry, part
        if not entries:
            return
        await self._renew_bars(owner, before, now)
        await self._space.write(shelf, entries, self._limits.ttl_s)
        after = await self._look(owner)
        # A forget that began meanwhile has written its mark, or sees these texts and removes them.
        gone = [(shelf, name) for name, part in written.items() if after.reaches(part, now)]
        tags = {tag for part in written.values() for tag in self._seal.tags(owner, part.address)}
        new = {(shelf, name) for name in entries}
        gone += [place for place in after.texts if place not in new and tag_of(place[1]) in tags]
        left = [place for place in after.texts if place not in set(gone)]
        gone += left[: max(0, len(left) - MAX_PARTS)]
        await self._remove([*gone, *after.expired])
        await self._trim(owner[0], TEXT, now)

    async def _renew_bars(self, owner: Owner, seen: _Contents, now: float) -> None:
        """Write the bars of a session again before they expire."""
        barred, newest = seen.barred, max((each.at for each in seen.marks.values()), default=now)
        if (barred.addresses or barred.everything) and newest + self._limits.ttl_s / 2 < now:
            mark = joined(Mark(), seen.marks.values(), now)
            await self._carry(owner, mark, seen, whole=False)

    async def get(self, owner: Owner, addresses: Collection[str]) -> FoundParts:
        """Return the state of addresses.

        Raises:
            PartStoreError: it can't be read.
        """
        wanted = dict.fromkeys(addresses)
        with self._doing("get"):
            for _ in range(_LOOKS):
                contents = await self._look(owner)
                places = self._places(owner, contents, wanted)
                entries = await self._read(places.values())
                if len(entries) == len(set(places.values())):
                    break  # else some were renewed or removed meanwhile
        known = {each for mark in contents.marks.values() for each in _forgotten(mark)}
        barred = contents.barred
        known |= wanted.keys() if barred.everything else barred.addresses
        parts, forgotten = {}, known.intersection(wanted)
        for address, place in places.items():
            entry = entries.get(place)
            part = self._seal.open_part(owner, place[1], entry) if entry is not None else None
            if part is None:
                continue
            if contents.reaches(part, time_of(place[1])):
                forgotten.add(address)
            else:
                parts[address] = part
        return FoundParts(parts, frozenset(forgotten - parts.keys()))

    async def listed(self, owner: Owner) -> Sequence[PartFacts]:
        """Return what a session has, oldest first; of more than ``MAX_LISTED``, the newest.

        Raises:
            PartStoreError: it can't be read.
        """
        with self._doing("list"):
            contents = await self._look(owner)
            facts = await self._facts(owner, contents.texts)
        latest = {
            each.address: each
            for place in contents.texts
            if (each := facts.get(place)) is not None
            and not contents.reaches(each, time_of(place[1]))
        }
        found = sorted(latest.values(), key=lambda each: (each.created, each.index, each.address))
        return found[-MAX_LISTED:]

    async def forget(self, owner: Owner, *, turn: str, demands: int) -> int:
        """Remove a session's texts, remember that they were forgotten, and return their number.

        Concurrent turns that were planned before may still put: what they put within ``FLOOR_S``
        is left out, too.

        Args:
            turn: the turn that demands it; what it puts itself is kept. Empty if no turn does.
            demands: the session's demands before. Texts of turns with more are kept.

        Raises:
            PartStoreError: not everything is known to be gone.
        """
        with self._doing("forget"):
            contents = await self._look(owner)
            mark = joined(Mark(demands, turn), contents.marks.values(), self._clock())
            return await self._carry(owner, mark, contents, whole=False)

    async def bar(self, owner: Owner, addresses: Collection[str] | None) -> None:
        """Remove a session's texts that have or hold these addresses, and refuse them from now on,
        whichever turn puts them. The session's puts renew the refusal.

        Args:
            addresses: None for all texts; also beyond ``MAX_FORGOTTEN`` all are refused.

        Raises:
            PartStoreError: not everything is known to be gone.
        """
        with self._doing("forget"):
            contents = await self._look(owner)
            mark = barring(Mark(), addresses or (), closed=addresses is None)
            mark = joined(mark, contents.marks.values(), self._clock())
            await self._carry(owner, mark, contents, whole=False)

    async def barred(self, owner: Owner) -> Barred:
        """Return the addresses that a session refuses.

        Raises:
            PartStoreError: it can't be read.
        """
        with self._doing("get"):
            return (await self._look(owner)).barred

    async def delete(self, owner: Owner) -> int:
        """Remove a session's texts and what it remembers of forgotten ones; return their number.

        What turns put that were planned before is left out. A new session of the same name may
        put.

        Raises:
            PartStoreError: not everything is known to be gone.
        """
        with self._doing("delete"):
            contents = await self._look(owner)
            return await self._carry(owner, Mark(before=self._clock()), contents, whole=True)

    async def _carry(self, owner: Owner, mark: Mark, seen: _Contents, *, whole: bool) -> int:
        """Write a mark, then remove what it reaches.

        Args:
            seen: marks that it replaces.
            whole: True to remove all texts, and to remember none of them.
        """
        now = self._clock()
        shelf, name = self._seal.shelves(owner)[0], mark_name(now)
        gone: list[str] = []
        try:
            await self._write_mark(owner, shelf, name, mark)
        except SpaceError:
            # On a full disk, the texts themselves make room for it.
            doomed, gone = await self._reached(owner, mark, now, whole=whole)
            if not doomed:
                raise
            await self._remove(doomed)
            await self._write_mark(owner, shelf, name, mark)
        doomed, addresses = await self._reached(owner, mark, now, whole=whole)
        addresses = [*gone, *addresses]
        if addresses and not whole:
            forgotten = with_forgotten(mark.forgotten, addresses)
            await self._write_mark(owner, shelf, name, replace(mark, forgotten=forgotten))
        await self._remove(doomed)
        await self._remove(
            each for each in seen.marks if whole or time_of(each[1]) + _GRACE_S <= now
        )
        await self._trim(owner[0], MARK, now)
        return len(set(addresses))

    async def _reached(
        self, owner: Owner, mark: Mark, now: float, *, whole: bool
    ) -> tuple[list[Place], list[str]]:
        """Return the texts that have to go, and addresses of those that hadn't expired."""
        contents = await self._look(owner)
        doomed, addresses = [], []
        facts = await self._facts(owner, [*contents.texts, *contents.expired])
        for text, found in facts.items():
            at = time_of(text[1])
            # By a clock that was set back, what is here may be from long after the mark.
            reached = found is None or mark.reaches(found) or contents.reaches(found, at)
            if whole or reached:
                doomed.append(text)
                if found is not None and at + self._limits.ttl_s > now:
                    addresses.append(found.address)
        return doomed, addresses

    async def held(self, owner: Owner, demands: int) -> tuple[int, int]:
        """Return the number of a tenant's texts, and of those that a forget should have reached.

        Args:
            demands: the session's demands after the forget.

        Raises:
            PartStoreError: it can't be read.
        """
        now = self._clock()
        with self._doing("look"):
            since = millis(now - self._limits.ttl_s)
            tenants = self._seal.tenants(owner[0])
            counts = [await self._space.count(tenant, since) for tenant in tenants]
            contents = await self._look(owner)
            facts = await self._facts(owner, [*contents.texts, *contents.expired])
        # One that doesn't open may be anything.
        left = sum(each is None or each.level < demands for each in facts.values())
        return max(sum(counts), left), left

    async def aclose(self) -> None:
        """Close connections."""
        await self._space.aclose()

    @contextmanager
    def _doing(self, operation: str) -> Iterator[None]:
        try:
            yield
        except SpaceError as error:
            self._failed(operation)
            raise PartStoreError(str(error)) from None

    async def _look(self, owner: Owner) -> _Contents:
        for _ in range(_LOOKS):
            contents = await self._looked(owner)
            if contents is not None:
                return contents
        raise SpaceError("forgets of one session follow one another too fast")

    async def _looked(self, owner: Owner) -> _Contents | None:
        """Return what a session has; None if another mark took the place of one meanwhile."""
        now, ttl_s = self._clock(), self._limits.ttl_s
        texts: list[Place] = []
        marks: dict[Place, WrittenMark] = {}
        for shelf in self._seal.shelves(owner):
            names = await self._space.names(shelf)
            texts += [(shelf, name) for name in names if kind_of(name) == TEXT]
            found = [
                name
                for name in names
                if kind_of(name) == MARK and time_of(name) + ttl_s + FLOOR_S > now
            ]
            entries = await self._space.read(shelf, found) if found else {}
            if len(entries) < len(found):
                return None
            for name in found:
                mark = self._seal.open_mark(owner, name, entries[name])
                marks[shelf, name] = WrittenMark(time_of(name), mark)
        texts.sort(key=lambda place: place[1][33:])
        live = [place for place in texts if time_of(place[1]) + ttl_s > now]
        return _Contents(live, texts[: len(texts) - len(live)], marks)

    def _places(
        self, owner: Owner, contents: _Contents, addresses: Iterable[str]
    ) -> dict[str, Place]:
        """Return the newest entry of each address that has one."""
        newest = {(place[0], tag_of(place[1])): place for place in contents.texts}
        found: dict[str, Place] = {}
        for address in addresses:
            tags = zip(self._seal.shelves(owner), self._seal.tags(owner, address), strict=True)
            own = [newest[each] for each in tags if each in newest]
            if own:
                found[address] = max(own, key=lambda place: place[1][33:])
        return found

    async def _facts(
        self, owner: Owner, places: Sequence[Place]
    ) -> Mapping[Place, PartFacts | None]:
        """Return the facts of the entries that exist; None for those that don't open."""
        heads = dict(await self._read(places, HEAD_BYTES))
        long = [place for place, head in heads.items() if head_end(head) > len(head)]
        heads |= await self._read(long)
        found = {}
        for number, (place, head) in enumerate(heads.items()):
            found[place] = self._seal.open_facts(owner, place[1], head)
            if not number % _OPENED_AT_ONCE:
                await asyncio.sleep(0)
        return found

    async def _read(
        self, places: Iterable[Place], most: int | None = None
    ) -> Mapping[Place, bytes]:
        found: dict[Place, bytes] = {}
        for shelf, names in _by_shelf(places).items():
            entries = await self._space.read(shelf, names, most)
            found |= {(shelf, name): entry for name, entry in entries.items()}
        return found

    async def _remove(self, places: Iterable[Place]) -> None:
        for shelf, names in _by_shelf(places).items():
            await self._space.remove(shelf, names)

    async def _write_mark(self, owner: Owner, shelf: Shelf, name: str, mark: Mark) -> None:
        entry = self._seal.close_mark(owner, name, mark)
        await self._space.write(shelf, {name: entry}, self._limits.ttl_s + FLOOR_S)

    async def _trim(self, tenant: str, kind: str, now: float) -> None:
        """Keep a tenant's entries of one kind within their bytes."""
        marks = kind == MARK
        before = millis(now - self._limits.ttl_s - (FLOOR_S if marks else 0))
        left = self._limits.tenant_bytes // (_MARKS_SHARE if marks else 1)
        # The first has the newest.
        for tag in self._seal.tenants(tenant):
            left -= await self._space.trim(tag, kind, most=max(0, left), before=before)


def _by_shelf(places: Iterable[Place]) -> Mapping[Shelf, list[str]]:
    found: dict[Shelf, list[str]] = {}
    for shelf, name in places:
        found.setdefault(shelf, []).append(name)
    return found


def _forgotten(written: WrittenMark) -> tuple[str, ...]:
    return written.mark.forgotten if written.mark is not None else ()
