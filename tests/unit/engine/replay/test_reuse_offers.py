"""The turns that a group may take from: all that were sent in it, and no trace of any other."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from support.replay_engine import LIVE, admit, make_engine, prefill, random_tokens, run

from leyline_engine.contract import EditPayload, Receipt, ReuseCounts, ReuseMode, ReusePayload
from leyline_replay.engine import ReplayEngine

DOCS = ReusePayload(mode=ReuseMode.LIVE, groups=("docs",))
SEEN = msgspec.structs.replace(DOCS, mode=ReuseMode.OBSERVE)
DOC = random_tokens(300, 1)


def turn(scope: str, session: str = "s", name: str = "t1", **fields: Any) -> EditPayload:
    """The payload of a tenant's turn."""
    return EditPayload(session=session, scope=scope, turn=name, **fields)


def ask(
    engine: ReplayEngine, tokens: list[int], payload: EditPayload, reuse: ReusePayload | None
) -> Receipt:
    """The receipt of one request."""
    return run(engine, tokens, payload, 0, reuse)[1].receipt


def offered(engine: ReplayEngine) -> int:
    """Tokens of the document that a member of the group could take."""
    counts = ask(engine, [*random_tokens(50, 4), *DOC, 6], turn("member"), SEEN).reuse
    assert counts is not None
    return counts.group


@pytest.mark.parametrize("private", [0, 2, 6])
def test_later_turns_outside_the_group_hide_nothing(private: int) -> None:
    """A document stays offered, however often its tenant sends it again by itself."""
    engine = make_engine(pool=8000)
    ask(engine, [*random_tokens(40, 2), *DOC, 5], turn("giver", "offered"), DOCS)
    for number in range(private):
        alone = [*random_tokens(40, 10 + number), *DOC, 5]
        ask(engine, alone, turn("giver", f"alone{number}"), None)
    assert offered(engine) == 300


def test_a_continuation_outside_the_group_hides_nothing() -> None:
    """Content sent in the group stays offered when its session continues by itself."""
    engine = make_engine(pool=8000)
    prompt = [*random_tokens(40, 2), *DOC, 5]
    ask(engine, prompt, turn("giver"), DOCS)
    ask(engine, [*prompt, *random_tokens(20, 3)], turn("giver", name="t2"), None)
    assert offered(engine) >= 300


@pytest.mark.parametrize("before", [True, False])
def test_an_earlier_turn_outside_the_group_hides_nothing(before: bool) -> None:
    """Of two turns over the same KV, the one in the group has the entries."""
    engine = make_engine(pool=8000)
    prompt = [*random_tokens(40, 2), *DOC, 5]
    if before:
        ask(engine, prompt, turn("giver", "alone"), LIVE)
    ask(engine, [*prompt, 9], turn("giver"), DOCS)
    assert offered(engine) >= 290


def counted(*, secret_sent: bool) -> ReuseCounts | None:
    """The account of a prompt that guesses a text of a turn outside the group."""
    engine = make_engine(pool=200_000)
    secret, texts = random_tokens(100, 77), [random_tokens(70, 200 + i) for i in range(32)]
    for number, text in enumerate(texts):
        prompt = [*random_tokens(40, 500 + number), *text, 3]
        ask(engine, prompt, turn("accomplice", f"x{number}"), DOCS)
    ask(engine, random_tokens(40, 1), turn("giver", "joins"), DOCS)
    if secret_sent:
        ask(engine, [*random_tokens(60, 2), *secret, 4], turn("giver", "alone"), LIVE)
    guess = [*random_tokens(40, 3), *(word for text in texts for word in (*text, 9)), *secret, 8]
    return ask(engine, guess, turn("member"), SEEN).reuse


def test_a_receipt_says_nothing_of_turns_outside_the_group() -> None:
    """Neither its counts nor its bounds depend on what the giver has sent by itself."""
    assert counted(secret_sent=True) == counted(secret_sent=False)


@pytest.mark.parametrize("members", [0, pytest.param(40, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("groups", [LIVE, DOCS])
def test_members_never_hide_a_tenants_own_content(members: int, groups: ReusePayload) -> None:
    """However many others have the text in front, in the group or not, one's own is found."""
    engine = make_engine(pool=200_000)
    common, own = random_tokens(1200, 1), random_tokens(400, 2)
    ask(engine, [*random_tokens(60, 3), *own, 5], turn("taker", "own"), DOCS)
    for number in range(members):
        ask(engine, random_tokens(40, 100 + number), turn(f"m{number}", "joins"), DOCS)
        text = [*random_tokens(33, 1000 + number), *common[:1150], 7]
        ask(engine, text, turn(f"m{number}", "text"), groups)
    prompt = [*random_tokens(50, 9), 3, *common, 4, *own, 6]
    found = ask(engine, prompt, turn("taker"), DOCS).reuse
    assert found is not None
    assert found.tenant == 400


@pytest.mark.parametrize("taker", ["member", "giver"])
@pytest.mark.parametrize("running", [True, False])
def test_a_forgotten_prompt_offers_no_kv_that_others_keep(taker: str, running: bool) -> None:
    """A stranger's equal prompt stays cached; nobody finds it by the one that was forgotten."""
    engine = make_engine(pool=4000)
    prompt = [*random_tokens(40, 6), *DOC, 3]
    ask(engine, prompt, turn("stranger"), LIVE)
    ask(engine, random_tokens(40, 5), turn("giver", "other"), DOCS)
    reader = admit(engine, prompt, turn("giver"), reuse=DOCS)
    prefill(reader)
    if not running:
        reader.finish()
    forget = turn("giver", name="t2", forget=("doc",))
    forgot = ask(engine, random_tokens(40, 8), forget, None).forgot
    assert forgot is not None
    assert forgot.shared_retained > 300
    asked = [*random_tokens(50, 9), *DOC, 4]
    counts = ask(engine, asked, turn(taker, "other", "t2"), DOCS).reuse
    assert counts == ReuseCounts(mode=ReuseMode.LIVE)
    engine.check_integrity()
