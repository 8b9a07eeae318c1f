"""Options of a request: counted, bounded, and read in time that grows with their number."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.linear import check_linear

from leyline_proxy.errors import BadRequestError
from leyline_proxy.model.messages import Message, text_of
from leyline_proxy.request.declared import MAX_REPLACEMENT, replace_spans
from leyline_proxy.request.parse import ChatRequest, parse_chat
from leyline_proxy.settings import Settings
from leyline_proxy.tenants import Tenant, build_directory

IMAGE = {"type": "image_url", "image_url": {"url": "u"}}
TALK: list[Message] = [
    {"role": "user", "content": "the task"},
    {"role": "user", "content": "go on"},
]


@pytest.fixture
def tenant() -> Tenant:
    """The tenant of a proxy without settings."""
    return build_directory(Settings()).authenticate({})


def asked(tenant: Tenant, messages: list[Any], **members: Any) -> ChatRequest:
    """A chat request, checked."""
    body = {"model": "m", "messages": messages, **members}
    return parse_chat(json.dumps(body).encode(), {}, tenant)


def test_spans_over_parts_cost_one_pass_over_both(tenant: Tenant) -> None:
    """Eight times the spans and parts cost eight times the time, not sixty-four times."""

    def check(count: int) -> Callable[[], object]:
        parts = [{"type": "text", "text": "xx"}] * count
        edits = [
            {"message": 0, "chars": [2 * n, 2 * n + 1], "replacement": "y"} for n in range(count)
        ]
        talk = [{"role": "user", "content": parts}, {"role": "user", "content": "on"}]
        return partial(asked, tenant, talk, leyline={"edits": edits})

    check_linear(check, 1000)


@given(st.data())
def test_spans_over_parts_are_spans_of_the_joined_text(data: st.DataObject) -> None:
    """The parts' texts together are those of the edited text, and other parts stay in order."""
    texts = data.draw(st.lists(st.text("ab", max_size=4), min_size=1, max_size=6))
    parts: list[Any] = []
    for text in texts:
        parts += [{"type": "text", "text": text}, *data.draw(st.sampled_from([[], [IMAGE]]))]
    whole = "".join(texts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=8)))
    spans = [
        (start, end, data.draw(st.sampled_from(["", "X", "YZ"])))
        for start, end in zip(cuts[::2], cuts[1::2], strict=False)
    ]
    after = replace_spans({"role": "user", "content": parts}, spans)
    plain = replace_spans({"role": "user", "content": whole}, spans)
    assert text_of(after) == plain["content"]
    images = [part for part in after["content"] if part is IMAGE]
    assert len(images) == parts.count(IMAGE)


@pytest.mark.parametrize(
    ("options", "param", "limit"),
    [
        ({"edits": [{"message": 0}] * 20_001}, "leyline.edits", "20000"),
        (
            {"edits": [{"message": 0, "replacement": "x" * (MAX_REPLACEMENT + 1)}]},
            "leyline.edits[0].replacement",
            str(MAX_REPLACEMENT),
        ),
        ({"undeclared": {f"r{n}": "exact" for n in range(9)}}, "leyline.undeclared", "5"),
        ({"context": {"need": ["tag:a"] * 257}}, "leyline.context.need", "256"),
        ({"context": {"exclude": ["tag:a"] * 257}}, "leyline.context.exclude", "256"),
        ({"reuse_groups": ["a"] * 17}, "leyline.reuse_groups", "16"),
        ({"share": "a" * 129}, "leyline.share", "128"),
        ({"compact": {"instructions": "x" * 16_385}}, "leyline.compact.instructions", "16384"),
    ],
)
def test_all_that_a_request_may_bring_is_bounded(
    tenant: Tenant, options: dict[str, Any], param: str, limit: str
) -> None:
    """More of an option is a 400 that names the field and its limit."""
    with pytest.raises(BadRequestError) as refused:
        asked(tenant, TALK, leyline=options)
    assert refused.value.param == param
    assert limit in refused.value.message
    assert len(refused.value.message) < 300


@pytest.mark.parametrize(
    ("message", "context", "param"),
    [
        ({"leyline": {"tags": ["t"] * 17}}, None, "messages[1].leyline.tags"),
        ({"leyline": {"tags": ["t" * 65]}}, None, "messages[1].leyline.tags[0]"),
        ({}, {"exclude_tools": ["t"] * 257}, "context_management.edits[0].exclude_tools"),
        ({}, {"exclude_tools": ["t" * 257]}, "context_management.edits[0].exclude_tools[0]"),
    ],
)
def test_annotations_and_edits_by_name_are_bounded(
    tenant: Tenant, message: dict[str, Any], context: dict[str, Any] | None, param: str
) -> None:
    """So are the tags of a message, and the tools that an edit of Anthropic's API excludes."""
    edits = [] if context is None else [{"type": "clear_tool_uses_20250919", **context}]
    talk = [TALK[0], TALK[1] | message]
    with pytest.raises(BadRequestError) as refused:
        asked(tenant, talk, context_management={"edits": edits})
    assert refused.value.param == param


def test_an_error_about_scopes_names_only_some(tenant: Tenant) -> None:
    """However many the messages name."""
    talk = [
        {"role": "user", "content": "x", "leyline": {"share": f"scope-{n}"}} for n in range(1000)
    ]
    with pytest.raises(BadRequestError) as refused:
        asked(tenant, talk)
    assert len(refused.value.message) < 300
