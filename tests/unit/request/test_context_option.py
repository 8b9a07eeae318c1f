"""The option ``leyline.context``: its selectors, its bounds, and its errors."""

from __future__ import annotations

from typing import Any

import pytest

from leyline_proxy.model.fields import OptionError
from leyline_proxy.model.working_set import Selector
from leyline_proxy.request.options import parse_options
from leyline_proxy.request.working_set import MAX_NAME, MAX_SELECTORS, read_selector

DIGITS = "0123456789abcdef" * 4


def test_an_option_is_read() -> None:
    """Both lists become selectors in their order, and an absent budget is the proxy's limit."""
    raw = {"need": [f"sha256:{DIGITS[:12]}", "tag:api"], "exclude": ["tool:web_search"]}
    option = parse_options({"context": raw | {"budget_tokens": 8000}}, max_edits=1).context
    assert option is not None
    assert option.budget_tokens == 8000
    assert option.needed == (Selector("address", f"sha256:{DIGITS[:12]}"), Selector("tag", "api"))
    assert option.excluded == (Selector("tool", "web_search"),)
    empty = parse_options({"context": {}}, max_edits=1).context
    assert empty is not None
    assert (empty.needed, empty.excluded, empty.budget_tokens) == ((), (), None)
    assert parse_options({}, max_edits=1).context is None


@pytest.mark.parametrize("count", [12, 31, 32, 33, 64])
def test_an_address_has_12_to_64_digits(count: int) -> None:
    """An address may be shortened, or have all digits, in either case; 32 of them are compared."""
    wanted = Selector("address", f"sha256:{DIGITS[:count][:32]}")
    assert read_selector(f"sha256:{DIGITS[:count]}") == wanted
    assert read_selector(f"sha256:{DIGITS[:count].upper()}") == wanted


@pytest.mark.parametrize(
    "text",
    [
        "",
        "api",
        "tag:",
        "tool:",
        "role:user",
        "TAG:api",
        "tag:line\nbreak",
        f"tag:{'x' * (MAX_NAME + 1)}",
        "sha256:",
        f"sha256:{DIGITS[:11]}",
        f"sha256:{DIGITS}0",
        f"sha256:{DIGITS[:11]}g",
        f"sha256:{DIGITS[:12]}\n",
        f"sha512:{DIGITS[:12]}",
        f" sha256:{DIGITS[:12]}",
    ],
)
@pytest.mark.parametrize("member", ["need", "exclude"])
def test_what_is_no_selector_is_named_with_the_fix(member: str, text: str) -> None:
    """The error names the place in the list and the three forms, and doesn't quote the text."""
    with pytest.raises(OptionError) as caught:
        parse_options({"context": {member: ["tag:a", f"tool:{'y' * MAX_NAME}", text]}}, max_edits=1)
    assert caught.value.param == f"leyline.context.{member}[2]"
    assert str(caught.value).startswith(
        f"leyline.context.{member}[2]: a selector is `sha256:` and 12 to 64 hex digits, "
        "`tag:NAME` or `tool:NAME`"
    )
    assert "xxx" not in str(caught.value)


@pytest.mark.parametrize(
    ("raw", "param", "words"),
    [
        ([], "leyline.context", "object"),
        ({"ned": []}, "leyline.context", "it may have need, exclude, budget_tokens"),
        ({"need": "tag:a"}, "leyline.context.need", "array"),
        ({"need": ["tag:a", 3]}, "leyline.context.need[1]", "str"),
        ({"need": ["tag:a"] * (MAX_SELECTORS + 1)}, "leyline.context.need", "<= 256"),
        ({"exclude": ["tag:a"] * (MAX_SELECTORS + 1)}, "leyline.context.exclude", "<= 256"),
        ({"budget_tokens": -1}, "leyline.context.budget_tokens", ">= 0"),
        ({"budget_tokens": 2**31}, "leyline.context.budget_tokens", "<= 2147483647"),
        ({"budget_tokens": "8000"}, "leyline.context.budget_tokens", "int"),
        ({"budget_tokens": True}, "leyline.context.budget_tokens", "int"),
    ],
)
def test_bounds_name_the_field(raw: Any, param: str, words: str) -> None:
    """A member of another type or beyond its bound is an error that names it."""
    with pytest.raises(OptionError) as caught:
        parse_options({"context": raw}, max_edits=1)
    assert caught.value.param == param
    assert words in str(caught.value)


def test_the_longest_lists_are_accepted() -> None:
    """The bounds themselves are allowed."""
    names = [f"tag:{'n' * MAX_NAME}"] * MAX_SELECTORS
    option = parse_options(
        {"context": {"need": names, "exclude": names, "budget_tokens": 0}}, max_edits=1
    )
    assert option.context is not None
    assert len(option.context.needed) == len(option.context.excluded) == MAX_SELECTORS
