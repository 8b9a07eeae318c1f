"""The place of messages in a prompt, beyond their contents."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from leyline_proxy.model.rendered import MessageSpan, Rendered
from leyline_proxy.model.spans import outer_extents


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
    """An extent reaches from the content before to the content after; it is unlimited where the
    template moves messages about and a message has no place of its own."""
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
