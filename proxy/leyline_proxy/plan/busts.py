"""The fate of the KV that a prompt could have had. Pure.

The retained turn that a prompt continues shows the KV within reach; the engine's receipt shows the
KV used. Every prompt token is one of these::

    prompt    0 ──────────────────────────────────────────── n
    reach     ═════════════════╗ edit ══════════╗ edit ═══
    receipt   cached ──────┤     spliced ───────┤   prefilled
              cached       lost  new   spliced    new  lost  new

Lost tokens were within reach but were prefilled. Tokens that were reused from elsewhere count by
themselves; the engine doesn't report their places, so they reduce what was lost last.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from leyline_engine.contract import TokenCounts, uncovered

from ..model.vocabulary import MODEL_CAUSE, PAGE_CAUSE
from .reach import Cut, Reach, Stretch, cause_label

PAGE = 64
"""Smallest loss that counts as the engine's, which rounds down to whole pages of its pool."""

Interval = tuple[int, int]


class Loss(NamedTuple):
    """Prompt tokens within reach that were prefilled, under one cause."""

    cause: str
    """One of :data:`~leyline_proxy.model.vocabulary.CAUSES`, ``page`` or ``model``."""
    cut: Cut | None
    """The edit to blame; None if no edit is, or if only messages are known."""
    start: int
    """Place in the prompt; 0 if unknown."""
    tokens: int
    kept_out: bool = False
    """See :class:`Stretch`."""
    placed: bool = True
    """True if the place is known."""


@dataclass(frozen=True, slots=True)
class CacheAccount:
    """The origin of a turn's prompt tokens; with the lost ones, the numbers add up to all."""

    cached: int = 0
    spliced: int = 0
    reused: int = 0
    fresh: int = 0
    busts: Mapping[str, int] = field(default_factory=dict)
    """Lost tokens by cause; none is 0."""
    missing: int = 0
    """Tokens that the proxy expected to be cached but the engine didn't have."""
    found: int = 0
    """Tokens that the engine had but the proxy didn't expect."""
    after_thinking: int = 0
    """Copied tokens after thinking that the template stripped: prefilled, were such edits exact."""
    thinking: int = 0
    """Lost tokens that would have been copied, were such edits amortized."""
    losses: tuple[Loss, ...] = ()
    """All lost tokens by place, those of partial pages included."""


def settle(
    reach: Reach,
    tokens: TokenCounts,
    *,
    copies: Sequence[Interval] = (),
    extents: Sequence[Interval] = (),
    told: int | None = None,
    reconciled: bool = True,
    page: int | None = None,
) -> CacheAccount:
    """Account for every token of a prompt.

    Args:
        tokens: as the engine reports; contradictory numbers are used as far as they fit.
        copies: prompt ranges that the engine was asked to splice, by position.
        extents: ranges that it did splice, by position; empty if it doesn't report them.
        told: ``cached_tokens`` of the engine's usage; None if absent.
        reconciled: True if the cached tokens should agree with the plan.
        page: tokens per page of the engine's pool; None if unknown.
    """
    prompt = max(0, tokens.prompt)
    cached = min(max(0, tokens.prefix), prompt)
    spliced = min(max(0, tokens.spliced), prompt - cached)
    reused = min(max(0, tokens.reused), prompt - cached - spliced)
    prefilled = prompt - cached - spliced - reused
    done = _done(copies, extents, cached, spliced)
    lost = list(_lost(reach, prompt, cached, done, page))
    losses = tuple(_limited(lost, prefilled))
    busts = _by_cause(losses)
    if busts.get("engine", 0) < PAGE:
        busts.pop("engine", None)
    fresh = prefilled - sum(busts.values())
    missing = found = 0
    # An engine finds another session's exact prefix, but not what that one spliced; and nothing of
    # another model's.
    comparable = reach.known and reach.moved not in ("session", MODEL_CAUSE)
    if reconciled and comparable and prompt:
        actual = cached + spliced + reused if told is None else told
        missing, found = _discrepancy(reach, copies, prompt, actual, reused)
    after_thinking = _covered(
        (max(start, stretch.start), min(end, stretch.end))
        for stretch in reach.stretches
        if stretch.thinking
        for start, end in done
    )
    thinking = min(prefilled, sum(each.tokens for each in lost if each.kept_out))
    return CacheAccount(
        cached, spliced, reused, fresh, busts, missing, found, after_thinking, thinking, losses
    )


def _done(
    copies: Sequence[Interval], extents: Sequence[Interval], cached: int, spliced: int
) -> list[Interval]:
    """Return the copies that were made. An engine that doesn't report them is taken to leave out
    the first ones: those in its own cache, and the beginning of the prompt, which it always
    computes."""
    if extents and sum(end - start for start, end in extents) == spliced:
        return list(extents)
    ahead = [(max(start, cached), end) for start, end in copies if end > cached]
    left_out = max(0, sum(end - start for start, end in ahead) - spliced)
    done: list[Interval] = []
    for start, end in ahead:
        skipped = min(left_out, end - start)
        left_out -= skipped
        if start + skipped < end:
            done.append((start + skipped, end))
    return done


def _lost(
    reach: Reach, prompt: int, cached: int, done: Sequence[Interval], page: int | None
) -> Iterator[Loss]:
    """Yield tokens within reach that were neither cached nor spliced, by place."""
    places = [cut.position for cut in reach.cuts]
    at = 0
    for stretch in reach.stretches:
        cause, cut = _blamed(reach, stretch, bisect_right(places, stretch.start), bool(done))
        if reach.estimated and stretch.first:
            yield Loss(cause, None, 0, stretch.end - stretch.start, placed=False)
            continue
        # The last token of a prompt is always computed.
        start, end = max(stretch.start, cached), min(stretch.end, prompt - 1)
        while at < len(done) and done[at][1] <= start:
            at += 1
        last = at
        while last < len(done) and done[last][0] < end:
            last += 1
        for left, right in uncovered((start, end), done[at:last]) if start < end else ():
            if stretch.first or reach.moved:
                yield Loss(cause, cut, left, right - left, stretch.kept_out)
                continue
            whole = _whole_pages(left, right, min(stretch.end, prompt - 1), page)
            if whole > left:
                yield Loss(cause, None, left, whole - left)
            if right > whole:
                yield Loss(PAGE_CAUSE, None, whole, right - whole)


def _whole_pages(left: int, right: int, end: int, page: int | None) -> int:
    """Return the end of the part of ``[left, right)`` that whole pages could have held.

    Args:
        end: end of the unedited tokens, of which an engine's cache has no partial page.
    """
    if page is None:
        return left if right - left < PAGE else right
    return min(right, max(left, end - end % page))


def _blamed(reach: Reach, stretch: Stretch, before: int, spliced: bool) -> tuple[str, Cut | None]:
    """Return the cause of a stretch's loss, and its edit.

    Args:
        before: number of edits in front of the stretch.
        spliced: True if the engine copied something. An edit that it spliced over then cuts
            nothing after the next edit.
    """
    cuts = reach.cuts[:before]
    hard = stretch.hard if reach.moved or spliced else ""
    if hard:
        cut = next((cut for cut in cuts if cut.mode != "amortize"), None)
    elif reach.moved:
        return reach.moved, None
    else:
        cut = next(iter(cuts[-1:] if spliced else cuts), None)
    label = hard or stretch.first or "engine"
    return (label, None) if cut is None else (cause_label(cut.cause), cut)


def _limited(lost: Iterable[Loss], prefilled: int) -> Iterator[Loss]:
    """Yield losses up to the number of prefilled tokens."""
    for each in lost:
        taken = min(each.tokens, prefilled)
        prefilled -= taken
        if taken > 0:
            yield each._replace(tokens=taken)


def _by_cause(losses: Iterable[Loss]) -> dict[str, int]:
    """Return sums by cause; partial pages are the engine's, and another model's tokens no loss."""
    busts: dict[str, int] = {}
    for each in losses:
        if each.cause == MODEL_CAUSE:
            continue
        cause = "engine" if each.cause == PAGE_CAUSE else each.cause
        busts[cause] = busts.get(cause, 0) + each.tokens
    return busts


def expected_loss(reach: Reach, copies: Collection[Interval]) -> int:
    """Return the tokens within reach that an engine which has everything will prefill again."""
    kept = [] if reach.moved else [(s.start, s.end) for s in reach.stretches if not s.first]
    within = [(stretch.start, stretch.end) for stretch in reach.stretches]
    return _covered([*within, *copies]) - _covered([*kept, *copies])


def _discrepancy(
    reach: Reach, copies: Collection[Interval], prompt: int, actual: int, reused: int
) -> tuple[int, int]:
    """Return the missing and the surplus tokens; fewer than :data:`PAGE` count as 0.

    Reused tokens, of which there are ``reused`` among the ``actual``, are never a surplus.
    """
    if reach.estimated and any(stretch.first for stretch in reach.stretches):
        return 0, 0
    intact = [] if reach.moved else [(s.start, s.end) for s in reach.stretches if not s.first]
    expected = min(_covered([*intact, *copies]), max(0, prompt - 1))
    missing, found = expected - actual, actual - reused - expected
    # The length of an answer that an unknown template left in the prompt isn't known.
    found = 0 if reach.estimated else found
    return (missing if missing >= PAGE else 0), (found if found >= PAGE else 0)


def _covered(intervals: Iterable[Interval]) -> int:
    """Return the number of positions in any of the intervals."""
    total = at = 0
    for start, end in sorted(intervals):
        total += max(0, end - max(start, at))
        at = max(at, end)
    return total
