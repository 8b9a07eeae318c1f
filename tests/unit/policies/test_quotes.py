"""The count of evicted text that a model writes again."""

from __future__ import annotations

from collections.abc import Collection

from hypothesis import given
from hypothesis import strategies as st

from leyline_policies.quotes import WINDOW, Plain, QuoteCounter, Quotes, plain, texts_in

LINE = "the quick brown fox jumps over the lazy dog near the bank"
OTHER = "pack my box with five dozen liquor jugs and send it north"


def windows(text: str) -> set[str]:
    """All windows of a text."""
    return {text[at : at + WINDOW] for at in range(len(text) - WINDOW + 1)}


def covered(text: str, chosen: Collection[str]) -> set[int]:
    """The characters with one of these windows around them."""
    starts = (at for at in range(len(text)) if text[at : at + WINDOW] in chosen)
    return {at + offset for at in starts for offset in range(WINDOW)}


def by_definition(
    text: str, kept: list[Plain], turns: list[tuple[Plain, list[Plain]]]
) -> tuple[int, int]:
    """Evicted and quoted characters, straight from the definition, window by window."""

    def held(prompt: list[Plain]) -> set[str]:
        return {window for each in prompt for window in windows(each)}

    if len(text) < WINDOW:
        return 0, 0
    evicted = set(range(len(text))) - covered(text, held(kept))
    quoted: set[int] = set()
    for wrote, prompt in turns:
        quoted |= covered(text, windows(wrote) - held(prompt))
    return len(evicted), len(evicted & quoted)


words = st.lists(st.sampled_from(["alpha", "be", "gamma delta", "x1", "y", LINE[:30]]), max_size=30)
texts = st.one_of(
    words.map(lambda each: plain(" ".join(each))),
    st.lists(st.sampled_from([LINE, OTHER, LINE[9:50], OTHER[:40], "?"]), max_size=4).map(
        lambda each: plain(" / ".join(each))
    ),
)
prompts = st.lists(texts, max_size=3)


@given(st.lists(texts, min_size=1, max_size=3), prompts, st.lists(st.tuples(texts, prompts)))
def test_counts_are_those_of_the_definition(
    evicted: list[Plain], kept: list[Plain], turns: list[tuple[Plain, list[Plain]]]
) -> None:
    """They are what looking at every window of every text gives."""
    counter = QuoteCounter()
    for number, text in enumerate(evicted):
        counter.evict(str(number), text, kept)
    fresh = sum(sum(counter.wrote([text], prompt).values()) for text, prompt in turns)
    found = counter.counts()
    for number, text in enumerate(evicted):
        assert found[str(number)] == Quotes(*by_definition(text, kept, turns))
    assert fresh == sum(each.quoted for each in found.values())


def test_a_quote_counts_once_and_only_if_the_prompt_lacks_it() -> None:
    """A repetition adds nothing, and a text that is still sent isn't quoted from the part."""
    counter = QuoteCounter()
    assert counter.evict("a", plain(f"{LINE}\n{OTHER}"), [plain(LINE)]).evicted == len(OTHER) + 1
    assert counter.wrote([plain(LINE)], []) == {}
    assert counter.wrote([plain(f"so:{OTHER[:39]}")], [plain(f"as I said, {OTHER}")]) == {}
    assert counter.wrote([plain(f"so:{OTHER[:39]}")], [plain(OTHER[:31])]) == {"a": 39}
    assert counter.wrote([plain(f"so:{OTHER[:39]}")], []) == {}
    assert counter.wrote([plain(OTHER)], []) == {"a": len(OTHER) - 39}


def test_white_space_and_json_make_no_difference() -> None:
    """Code is quoted whatever its indentation, and in a call's arguments as they are decoded."""
    code = f"def f():\n    return '{LINE}'\n"
    call = {"function": {"name": "write", "arguments": f'{{"to": ["a", "{LINE}\\n\\t{OTHER}"]}}'}}
    found = [*texts_in({"role": "assistant", "content": code, "tool_calls": [call]})]
    assert plain(f"def f(): return '{LINE}'") in found
    assert plain(f"{LINE} {OTHER}") in found
    cut = {"role": "assistant", "content": None, "function_call": {"arguments": "{cut \\n off"}}
    assert "{cut \\n off" in [*texts_in(cut)]


def test_a_part_that_is_evicted_further_keeps_its_quotes() -> None:
    """Earlier quotes count when more of the text goes."""
    counter = QuoteCounter()
    text = plain(f"{LINE} {OTHER}")
    counter.evict("a", text, [plain(LINE)])
    counter.wrote([plain(OTHER)], [])
    assert counter.evict("a", text, []) == Quotes(len(text), len(OTHER))
    counter.forget("a")
    assert counter.counts() == {}
    assert counter.wrote([plain(OTHER)], []) == {}


def test_texts_are_bounded_and_counts_stay() -> None:
    """The oldest text leaves first; nothing more of it is found."""
    counter = QuoteCounter(max_chars=len(LINE) + len(OTHER))
    counter.evict("a", plain(LINE), [])
    counter.wrote([plain(LINE[:39])], [])
    counter.evict("b", plain(OTHER), [])
    counter.evict("c", plain("?" * 40), [])
    assert counter.wrote([plain(LINE), plain(OTHER)], []) == {"b": len(OTHER)}
    assert counter.counts()["a"] == Quotes(len(LINE), 39)


def test_texts_that_repeat_themselves_end_soon() -> None:
    """Such a text is given up rather than compared for minutes; others are counted."""
    counter = QuoteCounter()
    same, line = Plain("a" * 200_000), plain(LINE)
    counter.evict("a", same, [])
    counter.evict("b", line, [])
    assert counter.wrote([Plain("a" * 100_000)], []) == {}
    assert counter.wrote([line], [same]) == {"b": len(LINE)}


def test_a_single_window_is_found_at_every_place() -> None:
    """A quote of just 32 characters counts wherever it is in the text."""
    for offset in range(2 * WINDOW):
        counter = QuoteCounter()
        text = plain(f"{'0123456789' * 8}"[:offset] + LINE[:WINDOW] + "!" * 40)
        counter.evict("a", text, [])
        assert counter.wrote([plain(f"<{LINE[:WINDOW]}>")], []) == {"a": WINDOW}
