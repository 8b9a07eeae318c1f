"""What an ordinary turn skips gives what the long way gives."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from leyline_proxy.edits.prepare import prepare, unedited
from leyline_proxy.model.diff import diff_messages
from leyline_proxy.model.messages import Message, check_messages, fingerprint
from leyline_proxy.model.rendered import MessageSpan, Rendered
from leyline_proxy.model.spans import outer_extents
from leyline_proxy.plan.token_diff import SourceView, continued, diff_tokens

CALL = {"id": "c", "type": "function", "function": {"name": "ls", "arguments": "{}"}}
MESSAGES: tuple[Message, ...] = (
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": [{"type": "text", "text": "a task"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "a listing", "cache_control": {}},
    {"role": "user", "content": "a task"},
)
tokens = st.lists(st.integers(0, 3), max_size=40)


@given(st.lists(st.sampled_from(MESSAGES), max_size=8))
def test_messages_that_nobody_edits_need_no_pipeline(messages: list[Message]) -> None:
    """They are prepared as a pipeline without policies prepares them."""
    client = tuple(messages)
    prints = [fingerprint(message) for message in client]
    short, long = unedited(client, prints), prepare(client, (), (), 3, fingerprints=prints)
    assert short == long
    assert short.client_fingerprints == long.client_fingerprints
    assert short.sent_fingerprints == long.sent_fingerprints
    assert short.messages == long.messages


@st.composite
def prompts(draw: st.DrawFn) -> tuple[Rendered, int]:
    """A prompt with spans of some of its messages, in order or moved about."""
    count = draw(st.integers(0, 8))
    located = draw(st.permutations([at for at in range(count) if draw(st.booleans())]))
    order = sorted(located) if draw(st.booleans()) else located
    spans, end = [], 0
    for message in order:
        start = end + draw(st.integers(0, 3))
        end = start + draw(st.integers(1, 4))
        spans.append(MessageSpan(message, start, end))
    length = end + draw(st.integers(0, 3))
    return Rendered(array("q", range(length)), tuple(spans)), count


@given(prompts())
def test_extents_reach_from_neighbour_to_neighbour(drawn: tuple[Rendered, int]) -> None:
    """From the content before to the content behind; anywhere, where the template moves messages
    about and a message has no place of its own."""
    prompt, count = drawn
    spans, length = prompt.spans, len(prompt.tokens)
    in_order = [span.message for span in spans] == sorted(span.message for span in spans)
    for message, extent in enumerate(outer_extents(prompt, count)):
        own = [at for at, span in enumerate(spans) if span.message == message]
        if own:
            before, behind = spans[: own[0]], spans[own[0] + 1 :]
        elif in_order:
            before = tuple(span for span in spans if span.message < message)
            behind = tuple(span for span in spans if span.message > message)
        else:
            before = behind = ()
        wanted = (before[-1].end if before else 0, behind[0].start if behind else length)
        assert extent == wanted


@given(tokens, tokens, st.integers(0, 40))
def test_a_prompt_that_goes_on_needs_no_alignment(old: list[int], new: list[int], cut: int) -> None:
    """Where nothing changed, the comparison is the same without a look at messages."""
    view = SourceView(array("q", old), (), min(cut, len(old)))
    for prompt in (array("q", new), array("q", old + new), array("q", old[:cut])):
        rendered = Rendered(prompt, ())
        short = continued(view, rendered)
        assert short in (None, diff_tokens(view, rendered, diff_messages([], [])))
    assert continued(view, Rendered(array("q", old + new), ())) is not None


@given(st.integers(0, len(MESSAGES)))
def test_a_list_is_checked_from_where_it_is_new(known: int) -> None:
    """What earlier messages called is known to later ones."""
    messages = [*MESSAGES]
    called = {"c"} if known > 2 else set()
    assert check_messages(messages, known, called) is messages
