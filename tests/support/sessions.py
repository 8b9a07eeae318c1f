"""Sessions as turns leave them: real policies, names and plans over small agents' histories."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

from hypothesis import strategies as st
from support.character_turns import render as characters

from leyline_engine.contract import (
    DirectiveResult,
    ForgetCounts,
    LineageRun,
    Mode,
    Reason,
    Receipt,
    TokenCounts,
    token_digest,
)
from leyline_policies import Policy, load_pipeline
from leyline_proxy.edits.prepare import PolicySession, prepare
from leyline_proxy.model.history import history_chain
from leyline_proxy.model.messages import Message, fingerprint
from leyline_proxy.model.paid import Bust, Origin, Paid, Price
from leyline_proxy.model.session import Place, RetainedTurn, Session, TurnSummary
from leyline_proxy.model.undeclared import UndeclaredRules
from leyline_proxy.model.verdicts import Verdict
from leyline_proxy.plan.derivation import readings_after
from leyline_proxy.plan.naming import name_spans
from leyline_proxy.plan.synthesis import synthesize

RULES = UndeclaredRules.parse(["tool=amortize", "user=amortize"])
KEY = b"chain"


render = partial(characters, context="context")
"""A token per character."""


@cache
def pipeline(spec: str) -> tuple[Policy, ...]:
    """The policies of a specification."""
    return tuple(load_pipeline(spec))


def blank(session_id: str, tenant: str = "t", key: str = "") -> Session:
    """A session before its first turn."""
    return Session(session_id, tenant, key, (), (), 0, 0.0, created=1.5)


def after_turn(
    session: Session, messages: Sequence[Message], spec: str = "keep_all", answer: str = "yes"
) -> Session:
    """The session after a turn of these messages under these policies."""
    index = session.next_index
    facts = PolicySession(
        window=4000, states=session.policy_states, completions=session.completions
    )
    prepared = prepare(messages, pipeline(spec), (), index, session=facts)
    rendered = render(prepared.messages)
    name = f"t{index}-{len(messages)}"
    names = name_spans(name, prepared, session.turns, session.departed, rendered)
    plan = synthesize(
        session.turns, prepared, rendered, RULES, names=names, model_fingerprint="m", sink=0
    )
    counts = TokenCounts(prompt=len(rendered.tokens), prefix=3, spliced=2 * len(plan.edits))
    receipt = Receipt(
        message_id=f"m-{index}",
        session=session.id,
        turn=name,
        outcome=plan.planned,
        reason=plan.reason,
        tokens=counts,
        directives=(DirectiveResult(0, Mode.AMORTIZE, Reason.REPREFILLED),) if plan.edits else (),
        forgot=ForgetCounts(overwritten=7) if plan.forgets else None,
        lineage=(LineageRun(4, "ab12"),) if plan.edits else (),
    )
    outputs = tuple(map(ord, answer))
    turn = RetainedTurn(
        turn=name,
        index=index,
        prepared=prepared,
        rendered=rendered,
        output_ids=outputs,
        lineage=receipt.lineage,
        receipt=receipt,
        digest=token_digest(rendered.tokens + array("q", outputs)),
        model_fingerprint="m",
        weight=16 * len(rendered.tokens),
        names=names,
    )
    summary = TurnSummary(
        index=index,
        turn=name,
        created=2.0 + index,
        planned=plan.planned,
        reason=plan.reason,
        edits=plan.edits,
        receipt=receipt,
        paid=_paid(name, len(rendered.tokens)),
    )
    session = replace(
        session, policy_states=prepared.states, places={f"run{index % 2}": Place("a", bool(index))}
    )
    session = readings_after(
        session,
        name,
        prepared,
        names,
        hidden=bool(receipt.lineage),
        retained=True,
        answers=bool(outputs),
    )
    return session.retain(turn, summary, keep=4, now=2.0 + index)


def _paid(name: str, tokens: int) -> Paid:
    """The account of a turn that lost a token of its own message."""
    return Paid(
        compared=name,
        estimated=False,
        lost=1,
        new=tokens - 1,
        cached=3,
        generated=None,
        busts=(Bust(Origin("undeclared", 1, "tool", "ls", "exact", "exact"), 1, 7, (1, 2)),),
        prefill_us=12.5,
        price=Price("EUR", 2.0, 0.5, 6.0),
        thinking=(0, 1),
    )


def turn_change(
    session_id: str,
    messages: Sequence[Message],
    *,
    tenant: str = "t",
    key: str = "",
    spec: str = "keep_all",
) -> Callable[[Session | None], Session]:
    """A store's change: one more turn of these messages."""
    return lambda known: after_turn(known or blank(session_id, tenant, key), messages, spec)


def chain_of(messages: Sequence[Message]) -> list[int]:
    """The history that a session with these messages is found by."""
    return history_chain(list(map(fingerprint, messages)), KEY)


def history(turns: int, task: str = "List the folders.", size: int = 20) -> list[Message]:
    """A task, and for each turn a call and its result."""
    messages: list[Message] = [
        {"role": "system", "content": "You are careful. sk-secret7"},
        {"role": "user", "content": task},
    ]
    for turn in range(turns):
        function = {"name": "ls", "arguments": json.dumps({"path": f"{task[:8]}/{turn}"})}
        call = {"id": f"c{turn}", "type": "function", "function": function}
        messages += [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"c{turn}", "content": f"result {turn} " * size},
        ]
    return messages


def _texts() -> st.SearchStrategy[str]:
    return st.one_of(
        st.sampled_from(["a" * 90, "see me@example.org", "sk-abc12", "ok", "größe 😀 \x00\n\\"]),
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=120),
    )


@st.composite
def histories(draw: st.DrawFn) -> list[Message]:
    """An agent's history with texts of any kind, images, reasoning and strange members."""
    messages: list[Message] = [
        {"role": "system", "content": draw(_texts())},
        {"role": "user", "content": draw(_texts())},
    ]
    for number in range(draw(st.integers(0, 4))):
        arguments = json.dumps({"path": draw(_texts())})
        function = {"name": draw(st.sampled_from(["read", "bash"])), "arguments": arguments}
        call = {"id": f"c{number}", "type": "function", "function": function}
        result: Any = draw(_texts())
        if draw(st.booleans()):
            image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
            result = [{"type": "text", "text": result}, image]
        messages += [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"c{number}", "content": result},
        ]
        if draw(st.booleans()):
            extra: dict[str, Any] = draw(
                st.dictionaries(
                    st.sampled_from(["reasoning_content", "x", "y"]),
                    st.one_of(
                        st.integers(-(2**63), 2**64 - 1), st.floats(-1e9, 1e9), st.booleans()
                    ),
                )
            )
            messages.append({"role": "assistant", "content": draw(_texts()), **extra})
            messages.append({"role": "user", "content": draw(_texts())})
    return messages


def verdicts() -> st.SearchStrategy[Verdict]:
    """Verdicts on a few messages, with names and hashes that several may share."""
    names = st.sampled_from(["t0-a.1", "t0-a.2", "t1-b.3", "t0-a.out"])
    return st.builds(
        Verdict,
        spans=st.lists(names, min_size=1, max_size=3, unique=True).map(tuple),
        prints=st.lists(st.sampled_from([1, 7, 2**64 - 1]), max_size=2, unique=True).map(tuple),
        policy=st.just("verbs"),
        why=st.just("verdict"),
        by=st.sampled_from(["api", "annotation", "policy"]),
        message=st.none() | st.integers(0, 9),
        role=st.just("tool"),
    )


@st.composite
def sessions(draw: st.DrawFn, specs: Sequence[str]) -> Session:
    """A session of a few turns: histories grow, are edited by the caller and by policies."""
    messages = draw(histories())
    session = blank("s-1")
    spec = draw(st.sampled_from(specs))
    for _ in range(draw(st.integers(0, 6))):
        session = after_turn(session, messages, spec, draw(_texts()))
        if draw(st.booleans()):
            spec = draw(st.sampled_from(specs))
        if draw(st.integers(0, 5)) == 0:
            session = draw(
                st.sampled_from(
                    [session.forget_sources(), session.lose_turn(), session.without_text()]
                )
            )
        messages = [*messages, {"role": "assistant", "content": draw(_texts())}]
        messages.append({"role": "user", "content": draw(_texts())})
        if draw(st.booleans()):
            place = draw(st.integers(1, len(messages) - 1))
            messages[place] = {**messages[place], "content": draw(_texts())}
    return replace(
        session,
        completions=draw(st.dictionaries(_texts(), _texts(), max_size=2)),
        unvouched=draw(st.booleans()),
        untraced=draw(st.integers(0, 9)),
        demands=draw(st.integers(0, 9)),
        verdicts=tuple(draw(st.lists(verdicts(), max_size=3))),
    )
