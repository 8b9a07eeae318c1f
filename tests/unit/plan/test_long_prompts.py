"""Prompts that are too long to be tokenised: by their own text, whatever the body has besides."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from support.fake_engine import CAPABILITY, MODEL
from support.sessions import after_turn, blank
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from leyline_engine.contract import Outcome, Reason
from leyline_policies import load_pipeline
from leyline_proxy.edits.editing import Edited
from leyline_proxy.edits.prepare import prepare
from leyline_proxy.model.messages import Message
from leyline_proxy.model.undeclared import UndeclaredRules
from leyline_proxy.plan.draft import LONGEST_TOKEN, draft_turn
from leyline_proxy.plan.plan_input import PlanInput
from leyline_proxy.plan.planning import plan_turn
from leyline_proxy.render import ChatRenderer
from leyline_proxy.request.parse import parse_chat
from leyline_proxy.settings import Settings
from leyline_proxy.telemetry.metrics import Metrics
from leyline_proxy.tenants import build_directory
from leyline_proxy.upstream.handshake import UpstreamStatus
from leyline_proxy.upstream.proof import Rendering

CONTEXT = 200
BOUND = CONTEXT * LONGEST_TOKEN
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% if message.role == 'user' %}{{ message.words }}{% endif %}{% endfor %}"
)
POLICY = "truncate_older_than:n=1,max_chars=40"


def status(*, proven: bool = True) -> UpstreamStatus:
    """An engine with a short context, whose tokens are bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: at for at, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    renderer = ChatRenderer(TEMPLATE, {}, tokenizer.to_str())
    return UpstreamStatus(
        up=True,
        capability=msgspec.structs.replace(CAPABILITY, max_context=CONTEXT),
        capability_problem="",
        rendering=Rendering(renderer, proven),
    )


def talk(steps: int, first: Message) -> list[Message]:
    """A task and so many results, of which a policy shortens all but the last."""
    messages = [first]
    for step in range(steps):
        call = {"id": f"c{step}", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        messages += [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"c{step}", "content": f"result {step} " * 20},
        ]
    return messages


def given(messages: list[Message], last: list[Message], *, proven: bool = True) -> PlanInput:
    """A turn after another one."""
    tenant = build_directory(Settings()).authenticate({})
    raw = msgspec.json.encode({"model": MODEL, "messages": messages})
    session = after_turn(blank("s"), last, POLICY)
    request = parse_chat(raw, {}, tenant)
    return PlanInput(
        "t1", request, load_pipeline(POLICY), UndeclaredRules(), session, status(proven=proven), 1
    )


def drafted(turn: PlanInput, *, runs: bool = True) -> Any:
    """The turn's draft, with its policies."""
    prepared = prepare(turn.request.messages, turn.policies, (), 1)
    return draft_turn(turn, Edited(prepared), Metrics(), runs=runs)


WORDS: Message = {"role": "user", "content": "x" * (BOUND + 1)}
DATA: Message = {"role": "user", "content": "Go.", "images": ["x" * (BOUND + 1)]}
PICTURE: Message = {
    "role": "user",
    "content": [{"type": "image_url", "image_url": {"url": "data:," + "x" * BOUND}}],
}


def test_only_the_text_of_a_prompt_makes_it_long() -> None:
    """A member that the template doesn't show has no size; a text beyond the bound is rendered on
    no turn, and an edit then reports why it wasn't spliced."""
    shown = given(talk(2, DATA), talk(1, DATA))
    assert len(shown.request.raw) > BOUND
    assert drafted(shown).rendered is not None
    long = given(talk(2, WORDS), talk(1, WORDS))
    draft = drafted(long)
    assert draft.rendered is None and draft.question is None
    assert BOUND < draft.size < BOUND + 1000
    plan = plan_turn(long, draft, Metrics()).plan
    assert plan.edits
    assert (plan.planned, plan.reason) == (Outcome.REPREFILLED, Reason.PROMPT_TOO_LONG)


def test_a_policy_that_adds_text_counts() -> None:
    """The text that is sent is measured: text in place of a short body's is no way round."""
    turn = given(talk(1, {"role": "user", "content": "Go."}), talk(0, WORDS))
    assert drafted(turn).rendered is not None
    prepared = prepare(talk(1, WORDS), (), (), 1)
    assert draft_turn(turn, Edited(prepared), Metrics()).size is not None


@pytest.mark.parametrize("proven", [True, False])
def test_pictures_dont_go_to_an_engine_twice(*, proven: bool) -> None:
    """An engine is asked for tokens beside a turn only within the bound, and always for a count;
    data of pictures doesn't make a prompt too long, while text in a question does."""
    turn = given(talk(2, PICTURE), talk(1, PICTURE), proven=proven)
    draft = drafted(turn)
    assert draft.rendered is None and draft.question is None and draft.size is None
    assert plan_turn(turn, draft, Metrics()).plan.reason is Reason.UNSUPPORTED_RUNTIME
    assert drafted(turn, runs=False).question is not None
    small = replace(turn, request=given(talk(0, {**PICTURE, "content": []}), []).request)
    assert proven or drafted(small).question is not None
    words = drafted(given(talk(2, WORDS), talk(1, WORDS), proven=False))
    assert words.size is not None
