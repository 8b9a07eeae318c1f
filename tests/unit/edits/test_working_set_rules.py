"""The working set by properties, for every small session and request."""

from __future__ import annotations

from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from working_set_kit import (
    EVERY,
    catalogue,
    catalogues,
    evicted,
    option,
    options,
    plan,
    stored,
)

from leyline_proxy.edits.working_set import settled
from leyline_proxy.model.parts import PartFacts
from leyline_proxy.model.working_set import (
    ContextPiece,
    PieceCatalogue,
    PieceCause,
    PieceVerdict,
    Treatment,
)
from leyline_proxy.request.working_set import ContextOption

BANNED = {Treatment.FORGOTTEN, Treatment.QUARANTINED}
MANY = settings(max_examples=examples(300))


def texts(piece: ContextPiece) -> set[str]:
    """Addresses of all that comes back with a message."""
    return {each for each in (piece.address, piece.part) if each is not None}


def matched(selectors: tuple[str, ...], session: PieceCatalogue) -> set[str]:
    """Known addresses that a list's selectors name uniquely; a store that is down adds none."""
    known = {text for each in session.messages for text in texts(each)} | session.forgotten
    known |= {each.address for each in session.parts if session.problem is None}
    found = [{each for each in known if each.startswith(name[:39])} for name in selectors]
    return {each for names in found if len(names) == 1 for each in names}


def is_named(piece: ContextPiece | PartFacts, selectors: tuple[str, ...]) -> bool:
    """True if a tag or a tool in the list names a piece."""
    return f"tool:{piece.tool}" in selectors or any(f"tag:{t}" in selectors for t in piece.tags)


@MANY
@given(options(), catalogues(), st.booleans())
def test_only_what_is_allowed_comes_back(
    asked: ContextOption, session: PieceCatalogue, recall: bool
) -> None:
    """Only evicted messages and stored parts come back: none forgotten, in quarantine, without
    recall, or from a store that can't say what was forgotten; whatever the selectors name."""
    found = plan(asked, session, recall=recall)
    banned = {t for m in session.messages if m.treatment in BANNED for t in texts(m)}
    banned |= session.forgotten
    for at in found.restore:
        assert session.messages[at].treatment is Treatment.EVICTED
        assert texts(session.messages[at]).isdisjoint(banned)
    assert banned.isdisjoint(found.append)
    listed = {t for m in session.messages if m.part is not None for t in texts(m)}
    listed |= {m.address or "" for m in session.messages if m.treatment is Treatment.WHOLE}
    # A text that a policy also dropped comes from the store, not with a run that holds it too.
    listed -= {m.address or "" for m in session.messages if m.treatment is Treatment.DROPPED}
    assert {each.address for each in session.parts}.issuperset(found.append)
    assert listed.isdisjoint(found.append)
    if not recall or session.problem is not None:
        assert (found.restore, found.append) == ((), ())
    if session.forgets:
        assert found.append == ()


@MANY
@given(options(), catalogues())
def test_what_is_excluded_stays_out(asked: ContextOption, session: PieceCatalogue) -> None:
    """Whole messages that are excluded leave, but for instructions and the user's last; evicted
    ones stay out. An address excludes always, a tag or a tool all but what is needed by address."""
    found = plan(asked, session)
    gone = matched(asked.exclude, session)
    needed = matched(asked.need, session) - gone
    users = [m.client_index for m in session.messages if m.role == "user"]
    for piece in session.messages:
        at, own = piece.client_index, texts(piece)
        runs = {m.part for m in session.messages if m.address in needed and m.part == piece.part}
        by_name = is_named(piece, asked.exclude) and own.isdisjoint(needed | runs)
        stays = piece.role == "system" or at == max(users) if users else piece.role == "system"
        leaves = piece.treatment is Treatment.WHOLE and bool(own) and not stays
        assert (at in found.evict) == (leaves and (by_name or bool(own & gone)))
        assert not (by_name and at in found.restore)
        assert not (at in found.restore and piece.part in gone)
    for part in session.parts:
        by_name = is_named(part, asked.exclude) and part.address not in needed
        assert not (by_name or part.address in gone) or part.address not in found.append


@MANY
@given(options(), catalogues(), st.booleans())
def test_the_budget_is_kept(asked: ContextOption, session: PieceCatalogue, recall: bool) -> None:
    """The texts that come back fit into the budget, and the sum is that of its pieces."""
    found = plan(asked, session, recall=recall, limit=45)
    stored_tokens = {each.address: each.tokens for each in session.parts}
    spent = sum(session.messages[at].tokens for at in found.restore)
    spent += sum(stored_tokens[each] for each in found.append)
    assert spent == found.spent_tokens <= found.budget_tokens <= 45
    assert asked.budget_tokens is None or found.budget_tokens <= asked.budget_tokens
    assert len(set(found.append)) == len(found.append)
    assert list(found.restore) == sorted(set(found.restore))


@MANY
@given(options(), catalogues(), st.booleans(), st.sampled_from(["tag:x", "tool:bash", "tag:z"]))
def test_every_need_is_reported_in_order(
    asked: ContextOption, session: PieceCatalogue, recall: bool, more: str
) -> None:
    """Each selector has a report, each piece one only; a further selector changes none before."""
    found = plan(asked, session, recall=recall)
    numbers = [int(each.selector.removeprefix("need[")[:-1]) for each in found.reports]
    assert numbers == sorted(numbers)
    assert set(numbers) == set(range(len(asked.need)))
    pieces = [(each.address, each.messages) for each in found.reports if each.tokens]
    assert len(set(pieces)) == len(pieces)
    assert plan(asked, session, recall=recall) == found
    longer = option(*asked.need, more, exclude=asked.exclude, budget_tokens=asked.budget_tokens)
    assert plan(longer, session, recall=recall).reports[: len(numbers)] == found.reports


@MANY
@given(catalogues())
def test_all_that_may_come_back_does(session: PieceCatalogue) -> None:
    """With enough budget and nothing excluded, each text is in the prompt once it is needed, or
    refused."""
    found = plan(option("tool:bash", "tool:web"), session)
    for piece in session.messages:
        if piece.tool and piece.treatment is Treatment.EVICTED:
            reports = [each for each in found.reports if each.address == piece.part]
            assert len(reports) == 1
            back = any(session.messages[at].part == piece.part for at in found.restore)
            whole = reports[0].verdict is PieceVerdict.HIT
            refused = reports[0].cause in {
                PieceCause.FORGOTTEN,
                PieceCause.QUARANTINED,
                PieceCause.STORE_DOWN,
            }
            assert [back, whole, refused].count(True) == 1


@MANY
@given(
    st.lists(st.tuples(st.integers(0, 12), st.booleans()), max_size=len(EVERY)),
    st.integers(0, 40),
    st.permutations(EVERY),
)
def test_the_choice_is_greedy(
    pieces: list[tuple[int, bool]], budget: int, names: list[str]
) -> None:
    """Of all affordable choices, it is the one that has the first piece, then the second, and so
    on: compared with every choice there is."""
    known = list(zip(names, pieces, strict=False))
    session = catalogue(
        *[evicted(name, tokens) for name, (tokens, listed) in known if listed],
        parts=tuple(stored(name, tokens) for name, (tokens, listed) in known if not listed),
    )
    found = plan(option(*[name for name, _ in known], budget_tokens=budget), session)
    choices = product((True, False), repeat=len(pieces))
    affordable = (
        each
        for each in choices
        if sum(tokens for (tokens, _), taken in zip(pieces, each, strict=True) if taken) <= budget
    )
    assert [each.cause is None for each in found.reports] == list(max(affordable))


_EXTENTS = st.tuples(st.integers(0, 40), st.integers(0, 40)).map(lambda pair: (*sorted(pair),))


@MANY
@given(st.lists(_EXTENTS, max_size=3), st.lists(_EXTENTS, max_size=5))
def test_a_hit_is_ninety_percent(
    places: list[tuple[int, int]], served: list[tuple[int, int]]
) -> None:
    """The share is that of the tokens counted one by one."""
    session = catalogue(*[evicted(EVERY[0], part=EVERY[1]) for _ in places])
    planned = plan(option(EVERY[1]), session)
    [final] = settled(planned, dict(enumerate(places)), {}, served)
    if not places:
        assert final.cause is PieceCause.UNKNOWN
        return
    own = {token for start, end in places for token in range(start, end)}
    cached = {token for start, end in served for token in range(start, end)}
    assert (final.tokens, final.price_tokens) == (len(own), len(own - cached))
    assert (final.verdict is PieceVerdict.HIT) == (len(own & cached) >= 0.9 * len(own))
