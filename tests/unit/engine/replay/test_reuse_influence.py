"""The influence of a document's first reader on those who reuse its KV, and where that ends.

The attack is HijackKV's (arXiv 2607.19957): a document that a victim will read, too, is sent first
after an attacker's own text, so that its KV remembers that text.
"""

from __future__ import annotations

import msgspec
import pytest
import torch
from support.replay_engine import (
    LIVE,
    OBSERVE,
    SCOPE,
    make_engine,
    random_tokens,
    reference,
    register,
    run,
    same_logits,
)

from leyline_engine.contract import ReuseMode, ReusePayload
from leyline_replay.engine import ReplayEngine

DOC = random_tokens(150, 9)
STEERING = [*random_tokens(200, 21), *DOC, 2]
"""An attacker's text, and the document after it."""
PROMPT = [*random_tokens(60, 3), 3, *DOC, 4]
"""The victim's prompt; nothing of the attacker's text is in it."""
GROUP = ReusePayload(mode=ReuseMode.LIVE, groups=("docs",))


def attacked(front: int = 21, scope: str = SCOPE, reuse: ReusePayload = GROUP) -> ReplayEngine:
    """An engine in which an attacker was the first to send the document."""
    engine = make_engine(pool=3000)
    steering = [*random_tokens(200, front), *STEERING[200:]]
    run(engine, steering, register("t1", session="attacker", scope=scope), reuse=reuse)
    return engine


def answered(engine: ReplayEngine, reuse: ReusePayload | None) -> torch.Tensor:
    """The first logits of the victim's turn: ``[vocab]``."""
    return run(engine, PROMPT, register("t1", session="victim"), reuse=reuse)[0]


@pytest.mark.parametrize("scope", [SCOPE, "another"], ids=["tenant", "group"])
def test_text_in_front_of_a_document_reaches_those_who_reuse_it(scope: str) -> None:
    """Two attackers' texts give a victim two answers, neither of which is its prompt's own: within
    a tenant, and between the tenants of a group. It is what the pages warn of."""
    one, other = (answered(attacked(front, scope), GROUP) for front in (21, 22))
    assert not same_logits(one, other)
    assert not same_logits(one, reference(PROMPT))


@pytest.mark.parametrize(
    ("scope", "victim"),
    [
        ("another", LIVE),
        ("another", msgspec.structs.replace(GROUP, groups=("other docs",))),
        (SCOPE, OBSERVE),
        (SCOPE, None),
        (SCOPE, msgspec.structs.replace(LIVE, own=True)),
        (SCOPE, msgspec.structs.replace(LIVE, margin=100)),
    ],
    ids=["tenant", "group", "observe", "off", "own", "gated"],
)
def test_it_reaches_nobody_else(scope: str, victim: ReusePayload | None) -> None:
    """Another tenant, a turn that doesn't take others' KV, and one that distrusts its answer get
    what their own prompt says."""
    assert same_logits(answered(attacked(scope=scope), victim), reference(PROMPT))


def test_a_victims_prompt_steers_no_third() -> None:
    """KV that a victim computed after such KV is its own: a session with the same prompt, which
    doesn't ask for reuse, computes it again."""
    engine = attacked()
    assert not same_logits(answered(engine, LIVE), reference(PROMPT))
    third = run(engine, PROMPT, register("t1", session="third"))[0]
    assert same_logits(third, reference(PROMPT))


def test_kv_that_read_nothing_else_steers_nobody() -> None:
    """A document first read after text with which the victim's prompt begins, too, is no attack:
    its KV is that of the prompt."""
    engine = make_engine(pool=3000)
    run(engine, [*PROMPT, 7, 8], register("t1", session="attacker"), reuse=LIVE)
    logits, record = run(engine, [*PROMPT, 9], register("t1", session="victim"), reuse=LIVE)
    assert record.receipt.tokens.reused == 0
    assert record.receipt.tokens.prefix == len(PROMPT)
    assert same_logits(logits, reference([*PROMPT, 9]))
