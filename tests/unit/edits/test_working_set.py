"""The working set by examples: each verdict, each cause, and the rules between selectors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from working_set_kit import (
    A_TOO,
    A,
    B,
    C,
    D,
    address,
    catalogue,
    evicted,
    msg,
    option,
    plan,
    stored,
)

from leyline_proxy.edits.working_set import settled
from leyline_proxy.model.working_set import (
    MAX_PIECES,
    ContextPiece,
    PieceCatalogue,
    PieceCause,
    PieceReport,
    PieceVerdict,
    Treatment,
)

PAGE = Path(__file__).parents[3] / "docs" / "concepts" / "working-set.md"
REFUSE, ABSTAIN = PieceVerdict.REFUSE, PieceVerdict.ABSTAIN

WITHOUT: list[tuple[PieceVerdict, PieceCause, dict[str, Any], PieceCatalogue, dict[str, Any]]] = [
    (REFUSE, PieceCause.FORGOTTEN, {"need": [A]}, catalogue(forgotten=frozenset({A})), {}),
    (
        REFUSE,
        PieceCause.FORGOTTEN,
        {"need": [A]},
        catalogue(evicted(A), forgotten=frozenset({A})),
        {},
    ),
    (
        REFUSE,
        PieceCause.FORGOTTEN,
        {"need": [A]},
        catalogue(msg(A, treatment=Treatment.FORGOTTEN), parts=(stored(A),)),
        {},
    ),
    (REFUSE, PieceCause.FORGOTTEN, {"need": [A]}, catalogue(parts=(stored(A),), forgets=True), {}),
    (
        REFUSE,
        PieceCause.QUARANTINED,
        {"need": [A]},
        catalogue(evicted(A), msg(A, treatment=Treatment.QUARANTINED)),
        {},
    ),
    (
        REFUSE,
        PieceCause.QUARANTINED,
        {"need": [D]},
        catalogue(evicted(A, part=D), evicted(B, part=D), msg(B, treatment=Treatment.QUARANTINED)),
        {},
    ),
    (REFUSE, PieceCause.POLICY, {"need": [A]}, catalogue(msg(A, treatment=Treatment.DROPPED)), {}),
    (REFUSE, PieceCause.TENANT, {"need": [A]}, catalogue(evicted(A)), {"recall": False}),
    (REFUSE, PieceCause.TENANT, {"need": [A]}, catalogue(parts=(stored(A),)), {"recall": False}),
    (REFUSE, PieceCause.TENANT, {"need": [A]}, catalogue(), {"recall": False}),
    (REFUSE, PieceCause.EXCLUDED, {"need": [A], "exclude": [A]}, catalogue(evicted(A)), {}),
    (
        REFUSE,
        PieceCause.EXCLUDED,
        {"need": ["tag:x"], "exclude": ["tool:web"]},
        catalogue(parts=(stored(A, tags=("x",), tool="web"),)),
        {},
    ),
    (ABSTAIN, PieceCause.UNKNOWN, {"need": [A]}, catalogue(evicted(B)), {}),
    (ABSTAIN, PieceCause.UNKNOWN, {"need": ["tag:x"]}, catalogue(evicted(B)), {}),
    (ABSTAIN, PieceCause.AMBIGUOUS, {"need": [A[:19]]}, catalogue(evicted(A), msg(A_TOO)), {}),
    (
        ABSTAIN,
        PieceCause.AMBIGUOUS,
        {"need": [A[:19]]},
        catalogue(evicted(A), forgotten=frozenset({A_TOO})),
        {},
    ),
    (
        ABSTAIN,
        PieceCause.OVER_BUDGET,
        {"need": [A], "budget_tokens": 9},
        catalogue(evicted(A, 10)),
        {},
    ),
    (ABSTAIN, PieceCause.TOO_LARGE, {"need": [A]}, catalogue(parts=(stored(A, 10),)), {"limit": 9}),
    (ABSTAIN, PieceCause.STORE_DOWN, {"need": [A]}, catalogue(problem="away"), {}),
    (ABSTAIN, PieceCause.STORE_DOWN, {"need": [A]}, catalogue(evicted(A), problem="away"), {}),
    (ABSTAIN, PieceCause.STORE_DOWN, {"need": ["tag:x"]}, catalogue(problem="away"), {}),
]
"""Sessions and requests that end without the piece: verdict, cause, request, session, settings."""


@pytest.mark.parametrize(("verdict", "cause", "asked", "session", "settings"), WITHOUT)
def test_a_piece_stays_out_for_a_reason(
    verdict: PieceVerdict,
    cause: PieceCause,
    asked: dict[str, Any],
    session: PieceCatalogue,
    settings: dict[str, Any],
) -> None:
    """Nothing is changed, and the report has the verdict and its cause."""
    found = plan(_option(asked), session, **settings)
    assert [(each.verdict, each.cause) for each in found.reports] == [(verdict, cause)]
    assert (found.restore, found.append, found.spent_tokens) == ((), (), 0)
    assert settled(found, {}, {}, [(0, 100)]) == found.reports


def _option(asked: Mapping[str, Any]) -> Any:
    return option(*asked["need"], **{k: v for k, v in asked.items() if k != "need"})


def test_causes_without_a_piece_of_their_own() -> None:
    """A selector without news is repeated, one too many is cut, and some messages stay."""
    texts = [f"sha256:{number:032x}" for number in range(MAX_PIECES + 1)]
    every = catalogue(*[msg(text, tags=("x",)) for text in texts])
    found = plan(option("tag:x", texts[0], texts[-1]), every)
    assert len(found.reports) == MAX_PIECES + 3
    assert [(each.selector, each.cause) for each in found.reports[-3:]] == [
        ("need[0]", PieceCause.LIMIT),
        ("need[1]", PieceCause.LIMIT),
        ("need[2]", PieceCause.REPEATED),
    ]
    few = catalogue(msg(A, role="system", tags=("x",)), msg(B, role="user", tags=("x",)), msg(C))
    found = plan(option(exclude=["tool:web", "tag:x", B, D, C]), few)
    assert [(e.selector, e.verdict, e.cause, e.messages) for e in found.refusals] == [
        ("exclude[1]", REFUSE, PieceCause.INSTRUCTIONS, (0,)),
        ("exclude[1]", REFUSE, PieceCause.LAST_USER, (1,)),
        ("exclude[3]", ABSTAIN, PieceCause.UNKNOWN, ()),
    ]
    assert found.evict == (2,)


def test_every_cause_has_an_example() -> None:
    """The two tests before reach the whole vocabulary, but for what only calls of models have."""
    elsewhere = {"limit", "repeated", "instructions", "last_user", "malformed"}
    assert {cause.value for _, cause, *_ in WITHOUT} | elsewhere == {*PieceCause}


@pytest.mark.parametrize(
    ("served", "whole", "restored", "appended"),
    [
        ([(0, 300)], "hit", "hit", "hit"),
        ([], "recompute", "recompute", "fault"),
        ([(0, 90), (100, 189), (210, 300)], "hit", "recompute", "hit"),
        ([(10, 60), (40, 100), (40, 80)], "hit", "recompute", "fault"),
        ([(0, 80), (5, 15), (150, 150), (110, 240)], "recompute", "hit", "fault"),
    ],
)
def test_pieces_in_the_prompt_settle_by_what_was_served(
    served: list[tuple[int, int]], whole: str, restored: str, appended: str
) -> None:
    """Ninety percent of a piece's tokens make a hit; else its text's origin names the verdict."""
    session = catalogue(msg(A, 99), evicted(B, 99), parts=(stored(C, 99),))
    planned = plan(option(A, B, C), session)
    assert [each.verdict.value for each in planned.reports] == ["hit", "recompute", "fault"]
    assert [each.price_tokens for each in planned.reports] == [0, 99, 99]
    final = settled(planned, {0: (0, 100), 1: (100, 200)}, {C: (200, 300)}, served)
    assert [each.verdict.value for each in final] == [whole, restored, appended]
    tokens = {token for start, end in served for token in range(start, end)}
    prices = [len(set(range(at, at + 100)) - tokens) for at in (0, 100, 200)]
    assert [(each.tokens, each.price_tokens) for each in final] == [(100, n) for n in prices]


def test_a_piece_without_a_place_is_no_hit() -> None:
    """A message that the template hides isn't said to be cached, nor a run with one hidden."""
    session = catalogue(msg(A), evicted(B, part=D), evicted(C, part=D), parts=(stored(A_TOO),))
    planned = plan(option(A, D, A_TOO), session)
    final = settled(planned, {1: (0, 10)}, {}, [(0, 100)])
    assert [(each.verdict.value, each.price_tokens) for each in final] == [
        ("recompute", 10),
        ("recompute", 20),
        ("fault", 10),
    ]
    hit = settled(planned, {0: (50, 50), 1: (0, 10), 2: (10, 20)}, {A_TOO: (20, 30)}, [(0, 30)])
    assert [each.verdict.value for each in hit] == ["hit", "hit", "hit"]


def test_later_pieces_may_fit_where_an_earlier_one_does_not() -> None:
    """The budget goes to pieces in order of need; one that is too long leaves room for others."""
    session = catalogue(evicted(A, 6), evicted(B, 7), evicted(C, 4), parts=(stored(D, 1),))
    found = plan(option(A, B, C, D, budget_tokens=10), session)
    assert (found.restore, found.append, found.spent_tokens) == ((0, 2), (), 10)
    over = [(each.address, each.price_tokens) for each in found.reports if each.cause is not None]
    assert over == [(B, 7), (D, 1)]
    assert plan(option(B, A, D, budget_tokens=10), session).restore == (1,)
    assert plan(option(A, budget_tokens=10), session, limit=5).budget_tokens == 5


def test_whole_messages_cost_nothing() -> None:
    """A piece in the prompt is reported at a budget of zero, also beside an evicted twin."""
    session = catalogue(evicted(A), msg(A), parts=(stored(A),))
    found = plan(option(A, budget_tokens=0), session)
    assert [(e.verdict.value, e.messages, e.price_tokens) for e in found.reports] == [
        ("hit", (1,), 0)
    ]
    assert (found.restore, found.append) == ((), ())


def test_a_selector_names_the_newest_first() -> None:
    """Messages come before what only the store has, and each kind from its end."""
    session = catalogue(
        evicted(A, tool="bash"),
        evicted(B, tool="bash"),
        msg(C, tool="web"),
        parts=(stored(address("e"), tool="bash"), stored(D, tool="bash"), stored(A, tool="bash")),
    )
    found = plan(option("tool:bash"), session)
    assert [each.address for each in found.reports] == [B, A, D, address("e")]
    assert (found.restore, found.append) == ((0, 1), (D, address("e")))


def test_an_address_in_need_is_stronger_than_an_excluded_tool() -> None:
    """A text needed by address stays or comes back; the tool's other results leave."""
    session = catalogue(
        evicted(A, tool="web"), msg(B, tool="web"), msg(C, tool="web"), msg(D, role="user")
    )
    found = plan(option("tag:x", A, B, exclude=["tool:web"]), session)
    assert (found.restore, found.evict) == ((0,), (2,))
    again = plan(option(A, B, exclude=["tool:web", B[:19]]), session)
    assert (again.restore, again.evict) == ((0,), (1, 2))
    assert again.reports[1].cause is PieceCause.EXCLUDED


def test_an_exclusion_concerns_the_messages_that_have_it() -> None:
    """An equal text elsewhere stays whole and is found there; an address excludes them all."""
    session = catalogue(msg(A, tool="web"), msg(A, tags=("x",)), msg(None, tool="web"))
    found = plan(option("tag:x", exclude=["tool:web"]), session)
    assert found.evict == (0,)
    assert [(each.verdict.value, each.messages) for each in found.reports] == [("hit", (1,))]
    assert plan(option(exclude=[A]), session).evict == (0, 1)


def test_a_run_comes_back_whole() -> None:
    """A message within a run brings the run, once; of equal texts, the newest comes back."""
    session = catalogue(
        evicted(A, 3, part=D),
        evicted(B, 4, part=D),
        msg(C),
        evicted(A, 5, part=D, tags=("x",)),
        evicted(B, 6, part=D),
        evicted(A_TOO, 1),
        evicted(A_TOO, 2),
    )
    found = plan(option("tag:x", B, A_TOO), session)
    assert found.restore == (3, 4, 6)
    assert [(e.address, e.messages, e.tokens) for e in found.reports if e.messages] == [
        (D, (3, 4), 11),
        (A_TOO, (6,), 2),
    ]
    assert found.reports[1].cause is PieceCause.REPEATED
    assert plan(option(D, exclude=["tag:x"]), session).restore == (3, 4)
    assert plan(option("tag:x", exclude=["tag:x"]), session).restore == ()


def test_a_store_that_is_away_is_said_beside_what_is_known() -> None:
    """A tag or a tool may name more than the client's list shows."""
    session = catalogue(msg(A, tags=("x",)), problem="away at 10.0.0.1")
    found = plan(option("tag:x"), session)
    assert [(each.verdict.value, each.cause) for each in found.reports] == [
        ("hit", None),
        ("abstain", PieceCause.STORE_DOWN),
    ]
    assert "10.0.0.1" not in str([each.document() for each in found.reports])
    alone = plan(option("tag:x"), session, recall=False)
    assert [each.verdict.value for each in alone.reports] == ["hit"]


def test_a_report_is_a_document() -> None:
    """The account's entry has numbers, names and an address."""
    report = PieceReport(
        selector="need[0]",
        verdict=ABSTAIN,
        cause=PieceCause.OVER_BUDGET,
        address=A,
        messages=(3,),
        tokens=7,
        price_tokens=7,
    )
    assert report.document() == {
        "selector": "need[0]",
        "verdict": "abstain",
        "cause": "over_budget",
        "address": A,
        "messages": [3],
        "tokens": 7,
        "price_tokens": 7,
    }


def test_a_catalogue_that_contradicts_itself_is_an_error() -> None:
    """Indices are those of the list, and an address in a stub is an eviction's."""
    with pytest.raises(ValueError, match="whole and in order"):
        PieceCatalogue((ContextPiece(client_index=1, role="user", tokens=1),))
    with pytest.raises(ValueError, match="evicted"):
        catalogue(msg(A, part=A))
    with pytest.raises(ValueError, match="evicted"):
        catalogue(msg(A, treatment=Treatment.EVICTED))


def test_the_page_has_every_verdict_and_cause() -> None:
    """The tables of the page are the closed vocabularies."""
    rows = re.findall(r"^\| `([a-z_]+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    words = sorted([*PieceVerdict, *PieceCause])
    assert sorted(set(rows) - {"need", "exclude", "budget_tokens"}) == words
