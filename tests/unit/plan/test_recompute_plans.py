"""Plans that compute quotes of a cut again: the copies on both sides still reproduce the prompt."""

from __future__ import annotations

from support.character_turns import Rule, copies, render, retained

from leyline_engine.contract import LiteralSegment, Recompute
from leyline_proxy.edits.prepare import prepare
from leyline_proxy.model.session import Departed
from leyline_proxy.model.undeclared import UndeclaredRules
from leyline_proxy.plan.naming import name_spans
from leyline_proxy.plan.synthesis import TurnPlan, synthesize

SECRET = "the value is qzx-77-vjk"
TALK = [
    {"role": "user", "content": "read it, " + "please " * 20},
    {"role": "assistant", "content": f"begin {SECRET} end"},
    {"role": "user", "content": "and then " * 12 + "qzx-77-vjk" + " was said " * 12},
]


def planned(recompute: Recompute) -> tuple[TurnPlan, str]:
    """The plan of a turn that cuts the value, and its prompt."""
    source = retained(prepare(TALK, [], [], 0), output="fine")
    prepared = prepare(TALK, [Rule(SECRET, "[cut]")], [], 1)
    prompt = render(prepared.messages)
    plan = synthesize(
        [source],
        prepared,
        prompt,
        UndeclaredRules(),
        names=name_spans("now", prepared, [source], Departed(), prompt),
        model_fingerprint="m",
        sink=0,
        recompute=recompute,
    )
    for segment in copies(plan):
        kept = source.tokens[segment.start : segment.end]
        assert kept == prompt.tokens[segment.dest : segment.dest_end]
    return plan, "".join(map(chr, prompt.tokens))


def test_a_quote_is_a_literal_between_two_copies() -> None:
    """The value in later text is computed again; without quotes it is copied."""
    plan, text = planned(Recompute(quotes=4))
    place = text.index("qzx-77-vjk")
    literals = [each for each in plan.segments if isinstance(each, LiteralSegment)]
    assert any(each.dest <= place and each.dest_end >= place + 10 for each in literals)
    assert any(copy.dest >= place + 10 for copy in copies(plan))
    plain, _ = planned(Recompute())
    assert any(copy.dest < place < copy.dest_end for copy in copies(plain))


def test_a_boundary_is_computed_again_after_the_cut() -> None:
    """The copy after the cut begins so many tokens later."""
    first = [
        next(copy.dest for copy in copies(planned(Recompute(k))[0]) if copy.dest) for k in (0, 7)
    ]
    assert first[1] == first[0] + 7
