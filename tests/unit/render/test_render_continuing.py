"""A prompt that continues an earlier one equals the prompt made afresh."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokens_kit import check_places, texts, tokenizer_json

from leyline_proxy.render import ChatRenderer
from leyline_proxy.render.continuing import REACH, Beginnings
from leyline_proxy.render.tokens import PieceTokenizer

Message = dict[str, Any]

PLAIN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
GENERATION = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
LAST = (
    "{% for m in messages %}<|im_start|>{{ loop.index }} {{ m.role }}{% if loop.last %}!{% endif %}"
    "\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
)
COUNTING = (
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.n = ns.n + 1 %}{% endif %}<|im_start|>{{ ns.n }}{{ m.content }}<|im_end|>"
    "{% endfor %}"
)


@given(st.lists(texts, min_size=1, max_size=6), st.lists(texts, max_size=6), st.data())
def test_a_join_goes_on_from_the_one_before(
    before: list[str], added: list[str], data: st.DataObject
) -> None:
    """Ids and places are the whole text's, wherever the earlier join ended."""
    pieces, plain = PieceTokenizer(tokenizer_json()), Tokenizer.from_str(tokenizer_json())
    pieces.join([*before, "behind"]).tokens_at(range(3))
    first = pieces.join([*before, data.draw(texts)])
    first.tokens_at(range(len("".join(before)) + 1))
    whole = [*before, *added]
    for _ in range(2):
        joined = pieces.join(whole)
        text = "".join(whole)
        encoding = plain.encode(text, add_special_tokens=False)
        assert joined.ids.tolist() == encoding.ids
        check_places(joined, text, [start for start, _ in encoding.offsets])


@given(
    st.sampled_from((PLAIN + GENERATION, LAST, LAST + GENERATION, COUNTING)),
    st.lists(
        st.tuples(
            st.sampled_from(("user", "assistant", "tool")), st.sampled_from(["a", "b", "cc"])
        ),
        min_size=1,
        max_size=12,
    ),
    st.lists(st.integers(1, 12), min_size=1, max_size=5),
    st.booleans(),
)
def test_lasting_messages_render_as_others_do(
    template: str, said: list[tuple[str, str]], lengths: list[int], forks: bool
) -> None:
    """Growing, shrinking and forking lists of the same objects give the prompt made afresh."""
    remembering = ChatRenderer(template, {}, tokenizer_json())
    messages: list[Message] = [{"role": role, "content": text} for role, text in said]
    for length in lengths:
        taken = messages[:length]
        if forks and length < len(messages):
            taken = [*taken, {"role": "user", "content": f"fork {length}"}]
        anew = ChatRenderer(template, {}, tokenizer_json()).render(taken, None)
        assert remembering.render(taken, None, lasting=True) == anew


def test_messages_that_do_not_last_are_looked_at_again() -> None:
    """Without a word that they last, a change of an object is noticed."""
    renderer = ChatRenderer(PLAIN, {}, tokenizer_json())
    message = {"role": "user", "content": "one"}
    before = renderer.render([message], None, lasting=True).tokens
    message["content"] = "two"
    assert renderer.render([message], None).tokens != before


def test_the_longest_beginning_is_found_by_its_objects() -> None:
    """Equal objects are no beginning; the very same are, if the list ends soon after them."""
    held: Beginnings[list[int], str] = Beginnings(1000)
    items = [[number] for number in range(20)]
    held.put(items[:5], "five", 1)
    held.put(items[:6], "six", 1)
    found = held.find(items[:8])
    assert found is not None and found.value == "six"
    assert held.find([[number] for number in range(8)]) is None
    assert held.find(items[: 6 + REACH]) is None
    assert held.find(items[:4]) is None


def test_beginnings_are_bounded() -> None:
    """The least recently used go first, and what another takes the place of goes at once."""
    held: Beginnings[list[int], int] = Beginnings(10)
    lists = [[[number]] for number in range(30)]
    for number, items in enumerate(lists):
        held.put(items, number, 2)
        assert held.remembered_bytes <= 10
    kept = held.find(lists[-1])
    assert kept is not None
    assert held.find(lists[0]) is None
    held.put([*lists[-1], [0]], 1, 2, instead_of=kept)
    assert held.find(lists[-1]) is None
    assert held.remembered_bytes <= 10
