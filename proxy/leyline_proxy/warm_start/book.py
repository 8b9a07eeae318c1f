"""The runs of recently active sessions, in memory. Pure.

At most one run per session; bounded in tokens and runs. Where there are too many, the tenant with
the most loses its oldest.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from .runs import Owner, Run

MAX_RUNS = 4096
MAX_FORGETS = 4096
"""Number of sessions whose last forget is remembered."""


@dataclass(frozen=True, slots=True)
class _Forget:
    """The latest forget of a session, from the moment on when it was planned."""

    demands: int
    """Turns that were planned after no more demands may hold the forgotten text."""
    turn: str
    """The one turn that doesn't; empty if several demanded something at once."""


@dataclass(slots=True)
class _Shelf:
    """The runs of one tenant, the oldest first."""

    runs: OrderedDict[str, Run] = field(default_factory=OrderedDict)
    tokens: int = 0


class RunBook:
    """Runs by owner.

    Args:
        max_tokens: of all runs, each counted in full; a longer run is cut.
    """

    def __init__(self, max_tokens: int, max_runs: int = MAX_RUNS) -> None:
        self._max_tokens = max_tokens
        self._max_runs = max_runs
        self._shelves: dict[str, _Shelf] = {}
        self._forgets: OrderedDict[Owner, _Forget] = OrderedDict()
        self._tokens = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Run]:
        for shelf in self._shelves.values():
            yield from shelf.runs.values()

    @property
    def tokens(self) -> int:
        """Number of tokens of all runs, each counted in full."""
        return self._tokens

    def get(self, owner: Owner) -> Run | None:
        """Return a session's run, or None."""
        shelf = self._shelves.get(owner[0])
        return shelf.runs.get(owner[1]) if shelf is not None else None

    def keep(self, run: Run) -> None:
        """Put a run in the place of its session's earlier one."""
        self.drop(run.owner)
        run = run.first(self._max_tokens)
        shelf = self._shelves.setdefault(run.tenant, _Shelf())
        shelf.runs[run.session] = run
        shelf.tokens += len(run.tokens)
        self._tokens += len(run.tokens)
        self._count += 1
        while self._tokens > self._max_tokens:
            self._lose(max(self._shelves, key=lambda name: self._shelves[name].tokens))
        while self._count > self._max_runs:
            self._lose(max(self._shelves, key=lambda name: len(self._shelves[name].runs)))

    def settle(self, run: Run, turn: str, planned_after: int) -> bool:
        """Keep the run of a settled turn, unless it may hold text that its session forgets.

        Args:
            planned_after: the session's demands when the turn was planned.

        Returns:
            False if it may.
        """
        known = self._forgets.get(run.owner)
        if known is not None and turn != known.turn and planned_after <= known.demands:
            return False
        self.keep(run)
        return True

    def drop(self, owner: Owner) -> bool:
        """Remove a session's run; return True if it had one."""
        shelf = self._shelves.get(owner[0])
        run = shelf.runs.pop(owner[1], None) if shelf is not None else None
        if shelf is None or run is None:
            return False
        shelf.tokens -= len(run.tokens)
        self._tokens -= len(run.tokens)
        self._count -= 1
        if not shelf.runs:
            del self._shelves[owner[0]]
        return True

    def drop_tenant(self, tenant: str) -> None:
        """Remove all runs of a tenant."""
        for session in tuple(self._shelves.get(tenant, _Shelf()).runs):
            self.drop((tenant, session))

    def forget(self, owner: Owner, turn: str, demands: int) -> bool:
        """Remove a session's run, and refuse those of turns that were planned before.

        Args:
            turn: the turn that demands it; empty if none does.
            demands: the session's demands before this one.

        Returns:
            True if there was a run.
        """
        known = self._forgets.pop(owner, None)
        if known is not None and known.demands >= demands:
            turn, demands = "", known.demands
        self._forgets[owner] = _Forget(demands, turn)
        while len(self._forgets) > MAX_FORGETS:
            self._forgets.popitem(last=False)
        return self.drop(owner)

    def last_forget(self, owner: Owner) -> object:
        """Return an object that is another one after the session's next forget."""
        return self._forgets.get(owner)

    def replayed(self, run: Run, engine: str) -> None:
        """Note that a run of an engine has a session's KV now, unless the run has changed.

        Args:
            run: may be cut.
        """
        known = self.get(run.owner)
        if known is not None and known.at == run.at:
            self._shelves[run.tenant].runs[run.session] = replace(known, engine=engine)

    def expire(self, before: float) -> None:
        """Remove runs from before a time."""
        for run in [each for each in self if each.at < before]:
            self.drop(run.owner)

    def _lose(self, tenant: str) -> None:
        self.drop((tenant, next(iter(self._shelves[tenant].runs))))
