"""Results for texts, and the sessions that have used them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from leyline_proxy.model.text_memory import NO_SESSION, Left, Reader, TextMemory

OLD, NEW, OTHER = Reader("t", "s", 0), Reader("t", "s", 1), Reader("t", "other")


def memory(*uses: tuple[str, Reader], most: int = 1000) -> TextMemory[str, str]:
    """A memory after these uses of texts."""
    made = TextMemory[str, str](most, reader_weight=1)
    for text, reader in uses:
        (found,) = made.find([text], reader)
        assert found in (None, text)
        made.put(text, text, len(text), reader)
    return made


def test_a_forget_drops_what_the_session_has_used() -> None:
    """Also what others have used, too, which costs them the work again; but nothing else."""
    held = memory(("a", OLD), ("shared", OLD), ("shared", OTHER), ("b", OTHER))
    held.forget("t", "s", 0)
    assert held.find(["a", "shared", "b"], NO_SESSION) == [None, None, "b"]
    assert held.left("t", "other", 9) == Left(1, 0)


def test_text_that_was_used_again_after_a_forget_counts_as_that() -> None:
    """Only uses of before a demand are dropped by it, and are survivors."""
    held = memory(("a", OLD), ("b", OLD), ("b", NEW))
    assert held.left("t", "s", 1) == Left(1, 1)
    held.forget("t", "s", 0)
    assert held.find(["a", "b"], NEW) == [None, "b"]


def test_text_of_an_unknown_session_goes_with_any_of_its_tenant() -> None:
    """A request that is only counted may be the session's; those of other tenants aren't."""
    held = memory(("a", Reader("t")), ("b", Reader("u")), ("c", NO_SESSION))
    held.forget("t", "s", 5)
    assert held.find(["a", "b", "c"], NO_SESSION) == [None, "b", "c"]


@given(
    st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 3), st.integers(0, 2))),
    st.integers(1, 12),
)
def test_the_index_holds_no_text_that_the_memory_lacks(
    uses: list[tuple[str, int, int]], most: int
) -> None:
    """Whatever goes, for room or by a forget, leaves no trace in the index, nor weight."""
    held = memory(*((text, Reader("t", f"s{who}", at)) for text, who, at in uses), most=most)
    assert held.weight <= most
    indexed = {text for own in held._of.values() for text in own}
    assert indexed == set(held._held)
    for who in range(4):
        held.forget("t", f"s{who}")
        assert not any(held.left("t", f"s{who}", 9))
    assert (len(held), held.weight, held._of) == (0, 0, {})
