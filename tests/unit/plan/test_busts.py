"""The origin of every prompt token, and the blame for what was lost."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Literal, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyline_engine.contract import TokenCounts
from leyline_proxy.model.session import RetainedTurn
from leyline_proxy.model.vocabulary import CAUSES
from leyline_proxy.plan.busts import PAGE, settle
from leyline_proxy.plan.candidates import Candidate, Edit
from leyline_proxy.plan.causes import Cause
from leyline_proxy.plan.reach import Cut, Moved, Reach, Stretch, reach_of
from leyline_proxy.plan.token_diff import Hunk, Kept, TokenDiff

EDITS = ["policy", "declared", "undeclared", "template", "tools"]


@st.composite
def reaches(draw: st.DrawFn) -> Reach:
    """Disjoint stretches after more and more edits, as a comparison gives them."""
    stretches: list[Stretch] = []
    at, first, hard = 0, "", ""
    for _ in range(draw(st.integers(0, 5))):
        length = draw(st.integers(1, 300))
        stretches.append(Stretch(at, at + length, first, hard))
        at += length + draw(st.integers(1, 60))
        cause = draw(st.sampled_from(EDITS))
        first = first or cause
        hard = hard or draw(st.sampled_from(["", cause]))
    moved: Moved = draw(st.sampled_from(["", "", "failover", "engine"]))
    return Reach(tuple(stretches), known=True, moved=moved)


@st.composite
def counts(draw: st.DrawFn) -> TokenCounts:
    """An engine's counts; its numbers may contradict each other."""
    prompt = draw(st.integers(0, 1500))
    prefix = draw(st.integers(-5, 1600))
    spliced = draw(st.integers(-5, 1600))
    reused, prefilled = draw(st.integers(-5, 1600)), draw(st.integers(-5, 1600))
    return TokenCounts(prompt, prefix, spliced, reused, prefilled)


@st.composite
def copies(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Disjoint intervals by position."""
    bounds = sorted(draw(st.sets(st.integers(0, 1500), max_size=8)))
    return list(zip(bounds[::2], bounds[1::2], strict=False))


@given(reaches(), counts(), copies(), st.one_of(st.none(), st.integers(0, 1600)))
def test_every_token_is_accounted_for(
    reach: Reach, tokens: TokenCounts, pieces: list[tuple[int, int]], told: int | None
) -> None:
    """Cached, spliced, reused, lost and new tokens are the prompt, whatever an engine reports."""
    found = settle(reach, tokens, copies=pieces, told=told)
    lost = sum(found.busts.values())
    sources = (found.cached, found.spliced, found.reused, found.fresh)
    assert sum(sources) + lost == max(0, tokens.prompt)
    assert min(*sources, found.missing, found.found) >= 0
    assert all(count > 0 for count in found.busts.values())
    assert found.busts.keys() <= set(CAUSES)
    assert not (found.missing and found.found)


def _slow(
    reach: Reach, prompt: int, cached: int, pieces: Sequence[tuple[int, int]]
) -> dict[str, int]:
    """Find token by token who lost what, if the engine made all copies after its own prefix."""
    spliced = {p for start, end in pieces for p in range(max(start, cached), end)}
    lost: dict[str, int] = {}
    for start, end, first, hard, *_ in reach.stretches:
        for position in range(start, min(end, prompt - 1)):
            if position < cached or position in spliced:
                continue
            if reach.moved:
                cause = hard or reach.moved
            else:
                cause = (hard if spliced else "") or first or "engine"
            lost[cause] = lost.get(cause, 0) + 1
    return lost


def _counted(lost: dict[str, int]) -> dict[str, int]:
    """Without what is less than a page of the engine's."""
    return {each: n for each, n in lost.items() if each != "engine" or n >= PAGE}


@given(reaches(), st.data())
def test_lost_is_what_was_in_reach_and_prefilled(reach: Reach, data: st.DataObject) -> None:
    """The sums are those of looking at every single token."""
    prompt = data.draw(st.integers(2, 1500))
    cached = data.draw(st.integers(0, prompt))
    pieces = [(a, min(b, prompt)) for a, b in data.draw(copies()) if a < prompt]
    spliced = sum(max(0, b - max(a, cached)) for a, b in pieces)
    tokens = TokenCounts(prompt, cached, spliced, prefilled=prompt - cached - spliced)
    found, lost = settle(reach, tokens, copies=pieces), _slow(reach, prompt, cached, pieces)
    assert found.busts == _counted(lost)
    assert sum(loss.tokens for loss in found.losses) == sum(lost.values())


@given(reaches(), st.integers(2, 1500), st.data())
def test_more_cache_is_never_more_loss(reach: Reach, prompt: int, data: st.DataObject) -> None:
    """An engine that has a longer prefix loses no more, by any cause; one that has nothing loses
    all that was in reach, and one that has everything nothing."""
    shorter, longer = sorted(data.draw(st.tuples(*[st.integers(0, prompt)] * 2)))
    less = settle(reach, TokenCounts(prompt, shorter, 0, prefilled=prompt - shorter)).busts
    more = settle(reach, TokenCounts(prompt, longer, 0, prefilled=prompt - longer)).busts
    assert all(count <= less.get(cause, 0) for cause, count in more.items())
    nothing, whole = (
        settle(reach, TokenCounts(prompt, has, 0, prefilled=prompt - has)).busts
        for has in (0, prompt)
    )
    assert (nothing, whole) == (_counted(_slow(reach, prompt, 0, [])), {})


@given(st.integers(0, 2000), st.integers(0, 2000), st.integers(1, 3000))
def test_without_edits_the_engine_alone_loses(held: int, cached: int, prompt: int) -> None:
    """Unedited text that isn't cached was lost by the engine, and is missing in its own count, too:
    both agree."""
    reach = Reach((Stretch(0, held, "", ""),) if held else (), known=True)
    cached = min(cached, prompt)
    found = settle(reach, TokenCounts(prompt, cached, 0, prefilled=prompt - cached), told=cached)
    gone = max(0, min(held, prompt - 1) - cached)
    assert found.busts == ({"engine": gone} if gone >= PAGE else {})
    assert found.missing == (gone if gone >= PAGE else 0)


def test_a_page_is_no_loss() -> None:
    """An engine that rounds down to whole pages of its pool has lost nothing."""
    reach = Reach((Stretch(0, 1000, "", ""),), known=True)
    for told in (1000 - PAGE + 1, 960, 1000 + PAGE - 1):
        cached = min(told, 1000)
        found = settle(reach, TokenCounts(1100, cached, 0, prefilled=1100 - cached), told=told)
        assert not (found.busts or found.missing or found.found), told


@pytest.mark.parametrize("told", [None, 900])
def test_reuse_is_no_discrepancy(told: int | None) -> None:
    """Tokens from elsewhere are no surplus, and make up for what the engine no longer had."""
    reach = Reach((Stretch(0, 400, "", ""),), known=True)
    found = settle(reach, TokenCounts(1000, 400, 0, 500, 100), told=told)
    assert (found.reused, found.fresh, found.missing, found.found) == (500, 100, 0, 0)
    found = settle(reach, TokenCounts(1000, 100, 0, 800, 100), told=told)
    assert (found.reused, found.missing, found.found) == (800, 0, 0)


def test_the_edit_that_cuts_is_to_blame() -> None:
    """After a spliced edit and an exact one, the exact one is; without the splice the first is."""
    stretches = (Stretch(0, 100, "", ""), Stretch(120, 400, "policy", ""))
    reach = Reach((*stretches, Stretch(420, 900, "policy", "undeclared")), known=True)
    spliced = TokenCounts(1000, 100, 280, prefilled=620)
    assert settle(reach, spliced, copies=[(120, 400)]).busts == {"undeclared": 480}
    plain = TokenCounts(1000, 100, 0, prefilled=900)
    assert settle(reach, plain).busts == {"policy": 280 + 480}


def test_another_engine_is_to_blame_for_all_it_could_have_had() -> None:
    """After a failover nothing is expected to be cached, so that nothing is missing."""
    reach = Reach(
        (Stretch(0, 500, "", ""), Stretch(520, 900, "policy", "")), known=True, moved="failover"
    )
    found = settle(reach, TokenCounts(1000, 40, 0, prefilled=960), told=40)
    assert found.busts == {"failover": 460 + 380}
    assert (found.missing, found.found) == (0, 0)


def test_another_sessions_prefix_is_no_discrepancy() -> None:
    """Under a new id the engine may or may not find what the old one had: either is expected."""
    reach = Reach((Stretch(0, 900, "", ""),), known=True, moved="session")
    for cached in (0, 900):
        found = settle(reach, TokenCounts(1000, cached, 0, prefilled=1000 - cached), told=cached)
        assert found.busts == ({} if cached else {"session": 900})
        assert (found.missing, found.found) == (0, 0)


def test_more_than_was_expected_is_found() -> None:
    """Tokens that the account doesn't know of show that others sent the same."""
    reach = Reach((Stretch(0, 500, "", ""),), known=True)
    found = settle(reach, TokenCounts(1000, 900, 0, prefilled=100), told=900)
    assert (found.missing, found.found) == (0, 400)


def test_a_splice_that_was_refused_is_missing() -> None:
    """A planned copy that wasn't made is expected, lost to the edit, and missing."""
    reach = Reach((Stretch(0, 100, "", ""), Stretch(120, 900, "policy", "")), known=True)
    found = settle(reach, TokenCounts(1000, 100, 0, prefilled=900), copies=[(120, 900)])
    assert found.busts == {"policy": 780}
    assert found.missing == 780


def test_a_turn_that_forgets_is_not_reconciled() -> None:
    """KV that has read the forgotten text can't be expected to be cached still."""
    reach = Reach((Stretch(0, 500, "", ""),), known=True)
    found = settle(reach, TokenCounts(1000, 0, 0, prefilled=1000), reconciled=False)
    assert (found.missing, found.found) == (0, 0)
    assert found.busts == {"engine": 500}


def test_an_estimate_blames_the_edit_for_what_lies_behind_it() -> None:
    """If only messages are known, the loss is as much as was kept after the edit, at most what was
    prefilled; the expected part is unknown."""
    reach = Reach((Stretch(0, 300, "undeclared", "undeclared"),), known=True, estimated=True)
    found = settle(reach, TokenCounts(1000, 500, 0, prefilled=500), told=500)
    assert found.busts == {"undeclared": 300}
    assert (found.missing, found.found) == (0, 0)
    assert settle(reach, TokenCounts(1000, 900, 0, prefilled=100)).busts == {"undeclared": 100}


def test_the_first_edit_before_a_token_is_its_cause() -> None:
    """Of two edits the first one names what lies after both, the first that isn't amortized names
    what a splice can't carry; the token that was generated last has no KV."""

    def edit(at: int, cause: str, mode: Literal["amortize", "exact"]) -> Edit:
        causes = (Cause(cause, mode, "tool", None),)
        return Edit(Hunk(at, at + 10, at, at + 10), causes, mode, behind=True)

    kept = (Kept(0, 100, 0), Kept(110, 200, 110), Kept(210, 300, 210))
    edits = (edit(100, "policy:cut", "amortize"), edit(200, "undeclared", "exact"))
    diff = TokenDiff(kept, tuple(each.hunk for each in edits), 300)
    source = SimpleNamespace(turn="t0", tokens=tuple(range(300)), output_ids=(1,))
    found = reach_of(Candidate(cast("RetainedTurn", source), diff, edits, kept))
    assert found.stretches == (
        Stretch(0, 100, "", ""),
        Stretch(110, 200, "policy", ""),
        Stretch(210, 299, "policy", "undeclared"),
    )


def test_a_copy_that_an_engine_left_out_is_lost_where_it_was() -> None:
    """An engine that reports its copies shows which are missing; else the first ones are taken."""
    cuts = tuple(Cut(at, "undeclared", "amortize", "tool", at) for at in (100, 520))
    stretches = tuple(Stretch(*each, "undeclared", "") for each in ((120, 500), (530, 550)))
    reach = Reach((Stretch(0, 100, "", ""), *stretches), known=True, cuts=cuts)
    copies = [(0, 100), (120, 500), (530, 550)]
    tokens = TokenCounts(1000, 100, 380, prefilled=520)
    for extents, place in (([(120, 500)], 520), ([], 100), ([(120, 300)], 100)):
        (loss,) = settle(reach, tokens, copies=copies, extents=extents).losses
        assert loss.cut is not None
        assert (loss.cut.position, loss.tokens) == (place, 20)
