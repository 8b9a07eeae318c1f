"""A claim's terms: what is out of bounds is refused by the name of its field."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyline_engine.contract import Claim, ClaimError, Predicate

CENTURY_S = 100 * 365 * 24 * 3600


def document(**changes: Any) -> dict[str, Any]:
    """A claim as JSON has it; dotted names change the predicate."""
    predicate = {"source": "turn-1", "start": 0, "end": 960}
    claim: dict[str, Any] = {
        "id": "c1",
        "tenant": "t",
        "session": "s",
        "kind": "hard",
        "predicate": predicate,
    }
    for name, value in changes.items():
        (predicate if name in ("source", "start", "end", "share") else claim)[name] = value
    return claim


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("ttl_s", {"ttl_s": 0}),
        ("ttl_s", {"ttl_s": -1}),
        ("ttl_s", {"ttl_s": CENTURY_S}),
        ("priority", {"priority": 101}),
        ("priority", {"priority": -1}),
        ("revision", {"revision": 0}),
        ("revision", {"revision": 2**53}),
        ("id", {"id": ""}),
        ("id", {"id": "a b"}),
        ("id", {"id": "x" * 129}),
        ("tenant", {"tenant": "\n"}),
        ("session", {"session": ""}),
        ("reason", {"reason": "x" * 257}),
        ("predicate.source", {"source": ""}),
        ("predicate.start", {"start": -1}),
        ("predicate.end", {"end": 0}),
        ("predicate.end", {"start": 960}),
        ("predicate.end", {"end": 2**31}),
        ("predicate.share", {"share": 0.0}),
        ("predicate.share", {"share": 1.01}),
    ],
)
def test_values_out_of_bounds_name_their_field(field: str, change: dict[str, Any]) -> None:
    """Decoded from JSON, the message begins with the field that has to change."""
    with pytest.raises(msgspec.ValidationError) as refused:
        msgspec.convert(document(**change), Claim)
    assert isinstance(refused.value.__cause__, ClaimError)
    assert refused.value.__cause__.field == field
    assert str(refused.value).startswith(f"{field}: ")


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("ttl_s", {"ttl_s": "60"}),
        ("ttl_s", {"ttl_s": 1.5}),
        ("kind", {"kind": "firm"}),
        ("predicate.end", {"end": None}),
        ("write_no_admit", {"write_no_admit": 1}),
        ("colour", {"colour": "red"}),
    ],
)
def test_values_of_the_wrong_type_name_their_field(field: str, change: dict[str, Any]) -> None:
    """Unknown members are refused as well; a misspelt TTL must not mean forever."""
    with pytest.raises(msgspec.ValidationError, match=field):
        msgspec.convert(document(**change), Claim)


def test_a_share_that_is_no_number_is_refused() -> None:
    """NaN compares false with everything and still doesn't get through."""
    with pytest.raises(ClaimError, match=r"predicate\.share"):
        Predicate("s", 0, 1, float("nan"))


def test_a_claim_survives_the_wire() -> None:
    """Encoded and decoded, it is the same claim."""
    claim = msgspec.convert(document(ttl_s=604_800, share=0.25, reason="näher"), Claim)
    assert msgspec.json.decode(msgspec.json.encode(claim), type=Claim) == claim


@given(
    start=st.integers(0, 5000),
    length=st.integers(1, 5000),
    hundredths=st.integers(1, 100),
    page=st.sampled_from([1, 16, 64]),
)
def test_a_share_of_a_span_is_rounded_up_to_pages(
    start: int, length: int, hundredths: int, page: int
) -> None:
    """The share is as many whole pages as exact arithmetic on fractions says, and at least one."""
    predicate = Predicate("s", start, start + length, hundredths / 100)
    first, end = predicate.page_span(page)
    assert first * page <= start < (first + 1) * page
    assert (end - 1) * page < start + length <= end * page
    assert predicate.required_pages(page) == -(-hundredths * (end - first) // 100)
