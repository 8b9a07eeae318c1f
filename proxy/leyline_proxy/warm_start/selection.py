"""The choice of runs within a number of tokens, fair among tenants. Pure.

Tokens that runs of a tenant share from the beginning count once: an engine computes them once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .runs import EngineIdentity, Run, packed, shared_tokens


class Prefixes:
    """Packed runs, sorted: of all of them, a run's neighbours share the longest prefix with it."""

    def __init__(self) -> None:
        self._sorted: list[bytes] = []

    def shared(self, run: bytes) -> int:
        """Return the number of leading tokens that some run has as well."""
        place = bisect_left(self._sorted, run)
        beside = self._sorted[max(0, place - 1) : place + 1]
        return max((shared_tokens(run, other) for other in beside), default=0)

    def add(self, run: bytes) -> None:
        """Add a run."""
        place = bisect_left(self._sorted, run)
        self._sorted.insert(place, run)


@dataclass(frozen=True, slots=True)
class Selected:
    """Chosen runs, of tenants in turn and each tenant's most recent first."""

    runs: tuple[Run, ...]
    """The last one of a tenant may be cut to its first tokens."""
    left: tuple[Run, ...]
    """Runs of which no token was chosen."""
    tokens: int
    """Number of chosen tokens, shared ones once."""


def fair_shares(demands: Mapping[str, int], budget: int) -> dict[str, int]:
    """Return each tenant's part of a budget.

    Nobody gets more than its demand, and a tenant that wants less than an equal part leaves the
    rest to the others.
    """
    shares: dict[str, int] = {}
    rest, waiting = budget, sorted(demands.items(), key=lambda item: item[1])
    for index, (tenant, demand) in enumerate(waiting):
        shares[tenant] = min(demand, rest // (len(waiting) - index))
        rest -= shares[tenant]
    return shares


def select(runs: Iterable[Run], budget: int, longest: int | None = None) -> Selected:
    """Return the most recent runs that fit.

    Args:
        budget: tokens of all runs together, shared ones once.
        longest: largest number of tokens of one run; None for no limit.
    """
    queues: dict[str, list[Run]] = defaultdict(list)
    for run in sorted(runs, key=lambda each: -each.at):
        if run.tokens:
            queues[run.tenant].append(run.first(longest) if longest is not None else run)
    shares = fair_shares({name: unshared(queue) for name, queue in queues.items()}, budget)
    chosen: list[list[Run]] = []
    left: list[Run] = []
    total = 0
    for name, queue in queues.items():
        taken, rest, used = _take(queue, shares[name])
        chosen.append(taken)
        left += rest
        total += used
    rounds = max(map(len, chosen), default=0)
    mixed = [taken[turn] for turn in range(rounds) for taken in chosen if turn < len(taken)]
    return Selected(tuple(mixed), tuple(left), total)


def unshared(runs: Iterable[Run]) -> int:
    """Return the number of tokens of a tenant's runs, those that they share counted once."""
    found: dict[EngineIdentity, Prefixes] = defaultdict(Prefixes)
    return sum(_add(found[run.identity], packed(run.tokens)) for run in runs)


def _take(queue: Sequence[Run], share: int) -> tuple[list[Run], list[Run], int]:
    """Return a tenant's chosen runs, the others, and the number of chosen tokens."""
    found: dict[EngineIdentity, Prefixes] = defaultdict(Prefixes)
    taken: list[Run] = []
    left: list[Run] = []
    used = 0
    for run in queue:
        known = found[run.identity]
        whole = packed(run.tokens)
        shared = known.shared(whole)
        room = share - used
        if not room and shared < len(run.tokens):
            left.append(run)
            continue
        part = run.first(shared + room)
        used += _add(known, packed(part.tokens))
        taken.append(part)
    return taken, left, used


def _add(known: Prefixes, run: bytes) -> int:
    new = len(run) // 4 - known.shared(run)
    known.add(run)
    return new
