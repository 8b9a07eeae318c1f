"""The choice of runs: fair among tenants, within its tokens, shared beginnings once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from warm_kit import run

from leyline_proxy.warm_start.runs import Run, packed, shared_tokens, unpacked
from leyline_proxy.warm_start.selection import fair_shares, select

prompts = st.lists(st.integers(0, 2), min_size=1, max_size=12)
shelves = st.dictionaries(
    st.sampled_from("abc"), st.lists(prompts, min_size=1, max_size=6), min_size=1
)


def made(drawn: dict[str, list[list[int]]]) -> list[Run]:
    """Runs of several tenants, each tenant's first one the most recent."""
    return [
        run(tokens, session=f"{tenant}{number}", tenant=tenant, at=100.0 - number)
        for tenant, found in drawn.items()
        for number, tokens in enumerate(found)
    ]


def distinct(runs: list[Run]) -> int:
    """Nodes of the tree that the runs of each tenant form: what an engine has to compute."""
    return len({(r.tenant, *r.tokens[:n]) for r in runs for n in range(1, len(r.tokens) + 1)})


@given(st.dictionaries(st.text(max_size=2), st.integers(0, 50)), st.integers(0, 120))
def test_a_budget_is_shared_fairly(demands: dict[str, int], budget: int) -> None:
    """Nobody gets less than its demand or an equal part, nothing that is wanted is left over, and
    only who wants more than others gets more."""
    shares = fair_shares(demands, budget)
    assert sum(shares.values()) == min(budget, sum(demands.values()))
    for tenant, demand in demands.items():
        assert min(demand, budget // len(demands)) <= shares[tenant] <= demand
        if shares[tenant] < demand:
            assert shares[tenant] >= max(shares.values()) - 1


@given(shelves, st.integers(0, 60))
def test_runs_fit_and_each_tenant_gets_its_part(
    drawn: dict[str, list[list[int]]], budget: int
) -> None:
    """The chosen tokens are the counted ones and fit; each tenant fills its fair share."""
    runs = made(drawn)
    chosen = select(runs, budget)
    assert chosen.tokens == distinct(list(chosen.runs)) <= budget
    demands = {name: distinct([r for r in runs if r.tenant == name]) for name in drawn}
    for name, share in fair_shares(demands, budget).items():
        assert distinct([r for r in chosen.runs if r.tenant == name]) == share


@given(shelves, st.integers(0, 60))
def test_a_tenant_keeps_what_is_most_recent(drawn: dict[str, list[list[int]]], budget: int) -> None:
    """A run is cut or left only if newer ones of its tenant have taken its place, and a cut run is
    the beginning of one."""
    runs = {r.session: r for r in made(drawn)}
    chosen = select(runs.values(), budget)
    assert {r.session for r in (*chosen.runs, *chosen.left)} == set(runs)
    for name in drawn:
        mine = [r for r in chosen.runs if r.tenant == name]
        assert [r.at for r in mine] == sorted((r.at for r in mine), reverse=True)
        grown = 0
        for r in mine:
            whole = runs[r.session]
            assert whole.tokens[: len(r.tokens)] == r.tokens
            assert all(span.end <= len(r.tokens) for span in r.spans)
            grown = distinct(mine[: mine.index(r) + 1])
            if len(r.tokens) < len(whole.tokens):
                assert grown == distinct(mine)  # nothing was added after the first cut


def test_tenants_take_turns() -> None:
    """The first runs of all tenants come before the second of any: time may end at any place."""
    runs = made({"a": [[1], [2], [3]], "b": [[1], [2]]})
    assert [r.tenant for r in select(runs, 50).runs] == ["a", "b", "a", "b", "a"]


def test_a_context_bounds_each_run() -> None:
    """A run longer than the engine's context is cut to its beginning."""
    assert list(select([run(range(9))], 50, longest=4).runs[0].tokens) == [0, 1, 2, 3]


@given(prompts, prompts)
def test_packed_tokens_sort_and_compare_as_tokens(one: list[int], other: list[int]) -> None:
    """Packing keeps order and shared beginnings, and is undone without loss."""
    big = [token * 100_000_007 for token in one], [token * 100_000_007 for token in other]
    left, right = (packed(run(tokens).tokens) for tokens in big)
    same = next(
        (n for n, pair in enumerate(zip(*big, strict=False)) if pair[0] != pair[1]),
        min(len(one), len(other)),
    )
    assert shared_tokens(left, right) == same
    assert (left < right) == (big[0] < big[1])
    assert unpacked(left).tolist() == big[0]
