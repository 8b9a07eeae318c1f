"""Token diffs with the tiny model's own template and tokenizer, under random edits."""

from __future__ import annotations

import json
import time
from array import array
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.examples import examples
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from leyline_proxy.model.diff import MessageDiff, Step, diff_messages
from leyline_proxy.model.rendered import MessageSpan, Rendered
from leyline_proxy.plan.token_diff import (
    MIN_RUN,
    Hunk,
    Kept,
    SourceView,
    TokenDiff,
    continued,
    diff_tokens,
)
from leyline_proxy.render import ChatRenderer
from leyline_replay.models.tiny_chat_template import CHAT_TEMPLATE

tokens = st.lists(st.integers(0, 3), max_size=40)

WORDS = st.sampled_from(["line", "of", "the", "listing", "\n", "  ", "é", "0042", "drwxr-xr-x"])
TEXTS = st.lists(WORDS, min_size=0, max_size=40).map(" ".join)
MARKS = ["<|im_start|>", "<|im_end|>"]


@pytest.fixture(scope="module")
def renderer() -> ChatRenderer:
    """The tiny chat template with a small byte-level BPE."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=MARKS, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["line of the listing 0042\n", "assistant system user"], trainer)
    return ChatRenderer(CHAT_TEMPLATE, {}, tokenizer.to_str())


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    """A system prompt, a task, and calls with their results and answers."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": draw(TEXTS)},
        {"role": "user", "content": draw(TEXTS)},
    ]
    for turn in range(draw(st.integers(0, 4))):
        function = {"name": "shell", "arguments": json.dumps({"command": draw(TEXTS)})}
        call = {"id": f"call_{turn}", "type": "function", "function": function}
        said = draw(st.none() | TEXTS)
        messages += [
            {"role": "assistant", "content": said, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"call_{turn}", "content": draw(TEXTS)},
        ]
    return messages


@st.composite
def edited(draw: st.DrawFn, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The list after a few drops, cuts, insertions, replacements, moves and repetitions."""
    result = [dict(message) for message in messages]
    for _ in range(draw(st.integers(0, 4))):
        if not result:
            break
        at = draw(st.integers(0, len(result) - 1))
        kind = draw(
            st.sampled_from(["drop", "cut", "insert", "replace", "swap", "repeat", "append"])
        )
        text = result[at].get("content") or ""
        if kind == "drop":
            del result[at]
        elif kind == "cut":
            low, high = sorted(draw(st.tuples(*[st.integers(0, len(text))] * 2)))
            result[at] = {**result[at], "content": text[:low] + "[cut]" + text[high:]}
        elif kind == "replace":
            result[at] = {**result[at], "content": draw(TEXTS)}
        elif kind == "insert":
            result.insert(at, {"role": "user", "content": draw(TEXTS)})
        elif kind == "swap":
            other = draw(st.integers(0, len(result) - 1))
            result[at], result[other] = result[other], result[at]
        elif kind == "repeat":
            result.insert(draw(st.integers(0, len(result))), result[at])
        else:
            result.append({"role": "user", "content": draw(TEXTS)})
    return result or [{"role": "user", "content": "all gone"}]


def check_tiling(source: array[int], prompt: array[int], diff: TokenDiff) -> None:
    """Runs are equal token by token; with the hunks they leave no gap and no overlap."""
    for run in diff.kept:
        assert run.length > 0
        assert all(
            source[run.start + step] == prompt[run.dest + step] for step in range(run.length)
        )
    pieces = [(r.start, r.end, r.dest, r.dest_end) for r in diff.kept]
    pieces += [(h.start, h.end, h.new_start, h.new_end) for h in diff.hunks]
    pieces.sort()
    assert all(piece[0] <= piece[1] and piece[2] <= piece[3] for piece in pieces)
    for before, after in pairwise([(0, 0, 0, 0), *pieces]):
        assert (before[1], before[3]) == (after[0], after[2])
    if diff.hunks:
        assert (pieces[-1][1], pieces[-1][3]) == (len(source), len(prompt))
    assert diff.tail == max((run.dest_end for run in diff.kept), default=0)
    assert diff.kept_tokens == sum(run.length for run in diff.kept)
    for hunk, run in pairwise(sorted([*diff.hunks, *diff.kept], key=lambda each: each.end)):
        if isinstance(hunk, Hunk) and isinstance(run, Kept) and hunk.end > hunk.start:
            ends = hunk.new_end > hunk.new_start and source[run.start - 1] == prompt[run.dest - 1]
            assert not ends, "an equal token in front of a run isn't kept"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(60))
@given(conversations().flatmap(lambda old: st.tuples(st.just(old), edited(old))), TEXTS)
def test_runs_and_hunks_tile_both_sides(
    renderer: ChatRenderer, pair: tuple[list[Any], list[Any]], said: str
) -> None:
    """Any edits of any conversation: kept tokens are the same, and nothing is left out."""
    old, new = pair
    before, prompt = renderer.render(old, None), renderer.render(new, None)
    source = before.tokens + renderer.encode(said)
    view = SourceView(source, before.spans, len(before.tokens))
    diff = diff_tokens(view, prompt, diff_messages(old, new))
    check_tiling(source, prompt.tokens, diff)
    for run in diff.kept:
        assert run.length >= MIN_RUN or run.start == run.dest == 0


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(40))
@given(conversations(), st.data())
def test_a_dropped_message_costs_only_itself(
    renderer: ChatRenderer, old: list[dict[str, Any]], data: st.DataObject
) -> None:
    """All tokens of the other messages are kept, wherever the gap is."""
    # Empty contents give the comparison nothing to align by.
    old = [
        {**message, "content": f"{message.get('content')} {at}"} for at, message in enumerate(old)
    ]
    gone = data.draw(st.integers(1, len(old) - 1))
    new = [*old[:gone], *old[gone + 1 :]]
    before, prompt = renderer.render(old, None), renderer.render(new, None)
    view = SourceView(before.tokens, before.spans, len(before.tokens))
    diff = diff_tokens(view, prompt, diff_messages(old, new))
    assert diff.kept_tokens >= len(prompt.tokens) - 2 * MIN_RUN


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(40))
@given(conversations(), TEXTS)
def test_a_summary_in_place_of_messages_costs_only_its_own_text(
    renderer: ChatRenderer, old: list[dict[str, Any]], summary: str
) -> None:
    """The end of a message, which the summary's has in common with what it replaces, is kept."""
    # Empty contents give the comparison nothing to align by.
    old = [
        {**message, "content": f"{message.get('content')} {at}"} for at, message in enumerate(old)
    ]
    go_on = {"role": "user", "content": "of the listing"}
    new = [old[0], {"role": "user", "content": f"0042 {summary} of"}, go_on]
    before, prompt = renderer.render([*old, go_on], None), renderer.render(new, None)
    view = SourceView(before.tokens, before.spans, len(before.tokens))
    diff = diff_tokens(view, prompt, diff_messages([*old, go_on], new))
    written = next(span for span in prompt.spans if span.message == 1)
    assert len(prompt.tokens) - diff.kept_tokens <= written.end - written.start


TOKENS = st.lists(st.integers(0, 3), max_size=30).map(lambda ids: array("q", ids))


def spans_of(data: st.DataObject, length: int, count: int) -> tuple[MessageSpan, ...]:
    """Disjoint spans of some messages, at any places."""
    cuts = sorted(data.draw(st.lists(st.integers(0, length), max_size=2 * count)))
    ends = list(zip(cuts[::2], cuts[1::2], strict=False))
    return tuple(
        MessageSpan(message, start, end) for message, (start, end) in enumerate(ends) if end > start
    )


@given(TOKENS, TOKENS, TOKENS, st.data())
def test_wrong_spans_never_make_a_wrong_diff(
    source: array[int], output: array[int], prompt: array[int], data: st.DataObject
) -> None:
    """Spans that lie only cost reuse: what is kept is still the same tokens, tiled."""
    count = 4
    places = range(count)
    steps = tuple(
        Step(data.draw(st.sampled_from(["kept", "replaced"])), place, place) for place in places
    )
    view = SourceView(source + output, spans_of(data, len(source), count), len(source))
    rendered = Rendered(prompt, spans_of(data, len(prompt), count))
    if not len(view.tokens) or not len(prompt):
        return
    check_tiling(view.tokens, prompt, diff_tokens(view, rendered, MessageDiff(steps)))


def test_large_differing_regions_are_compared_in_bounded_time() -> None:
    """Two long contents without a common token cost neither minutes nor gigabytes."""
    size = 60_000
    old, new = array("q", range(size)), array("q", range(size, 2 * size))
    spans = (MessageSpan(0, 0, size),)
    diff = MessageDiff((Step("replaced", 0, 0),))
    begun = time.perf_counter()
    result = diff_tokens(SourceView(old, spans, size), Rendered(new, spans), diff)
    assert time.perf_counter() - begun < 2
    assert (result.kept, len(result.hunks)) == ((), 1)


def answered(answer: list[int], now: list[int]) -> TokenDiff:
    """A prompt of 40 tokens, the model's answer to it, and the answer as the next prompt has it."""
    prompt = array("q", range(40))
    fresh = array("q", range(5000, 5010))
    spans = (MessageSpan(0, 0, 38),)
    new = prompt + array("q", now) + fresh
    grown = (*spans, MessageSpan(1, 40, 40 + len(now)), MessageSpan(2, len(new) - 10, len(new)))
    steps = (Step("kept", 0, 0), Step("inserted", None, 1), Step("inserted", None, 2))
    view = SourceView(prompt + array("q", answer), spans, len(prompt))
    return diff_tokens(view, Rendered(new, grown), MessageDiff(steps))


THINKING, SAID = list(range(1000, 1060)), list(range(2000, 2050))


def test_thinking_that_is_stripped_leaves_the_answer() -> None:
    """The text after the thinking is kept, moved, and no message is blamed."""
    diff = answered(THINKING + SAID, SAID)
    assert [(run.start, run.end, run.dest) for run in diff.kept] == [(0, 40, 0), (100, 150, 40)]
    (hunk, *_) = diff.hunks
    assert (hunk.start, hunk.end, hunk.old_messages, hunk.new_messages) == (40, 100, (), ())


def test_an_answer_that_was_rewritten_is_its_messages_edit() -> None:
    """If the caller's text has more than the template could add, the message is named."""
    diff = answered(THINKING + SAID, [*range(3000, 3030), *SAID])
    (hunk, *_) = diff.hunks
    assert (hunk.start, hunk.new_start, hunk.new_end, hunk.new_messages) == (40, 40, 70, (1,))
    assert diff.kept_tokens == 40 + len(SAID)


@pytest.mark.parametrize("now", [THINKING + SAID, list(range(4000, 4080)), THINKING[:5] + SAID[:9]])
def test_an_answer_as_it_was_or_quite_another_is_no_edit(now: list[int]) -> None:
    """Only a common beginning counts: differing text after it is a new turn."""
    diff = answered(THINKING + SAID, now)
    assert len(diff.kept) == 1
    assert not [hunk for hunk in diff.hunks if hunk.new_start < diff.tail]


@given(tokens, tokens, st.integers(0, 40))
def test_a_prompt_that_goes_on_needs_no_alignment(old: list[int], new: list[int], cut: int) -> None:
    """If nothing changed, the comparison is the same without a look at messages."""
    view = SourceView(array("q", old), (), min(cut, len(old)))
    for prompt in (array("q", new), array("q", old + new), array("q", old[:cut])):
        rendered = Rendered(prompt, ())
        short = continued(view, rendered)
        assert short in (None, diff_tokens(view, rendered, diff_messages([], [])))
    assert continued(view, Rendered(array("q", old + new), ())) is not None
