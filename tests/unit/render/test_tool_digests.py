"""Digests of tools: by what a template shows of them."""

from __future__ import annotations

from typing import Any

import pytest
from template_kit import renderer_of, tokenizer_of

HEAD = "{% if tools %}{% for tool in tools %}"
TAIL = (
    "{% endfor %}{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content }}<|im_end|>{% endfor %}"
)
AS_SENT = HEAD + "{{ tool | tojson }}" + TAIL
SORTED = HEAD + "{{ tool | tojson(sort_keys=true) }}" + TAIL
NAMES = HEAD + "{{ tool.function.name }}" + TAIL
DATED = HEAD + "{{ strftime_now('%f') }}{{ tool | tojson }}" + TAIL
BLIND = TAIL.removeprefix("{% endfor %}{% endif %}")
ONLY_FOR_TOOLS = (
    "{% if messages[0].role == 'tool' %}" + HEAD + "{{ tool | tojson }}"
    "{% endfor %}{% endif %}{% endif %}" + BLIND
)
PICKY = "{% if messages[0].role != 'system' %}{{ raise_exception('no') }}{% endif %}" + AS_SENT
FAILS = "{{ raise_exception('no') }}{{ tools }}"


def tool(*order: str, about: str = "Lists.") -> list[dict[str, Any]]:
    """One tool, whose function has its members in that order."""
    own = {"name": "ls", "description": about, "parameters": {"type": "object"}}
    return [{"type": "function", "function": {name: own[name] for name in order}}]


ONE = tool("name", "description", "parameters")
TURNED = tool("parameters", "name", "description")
OTHER = tool("name", "description", "parameters", about="Lists all.")


@pytest.mark.parametrize(
    ("template", "turned", "other"),
    [
        (AS_SENT, False, False),
        (SORTED, True, False),
        (NAMES, True, True),
        (DATED, False, False),
        (BLIND, True, True),
        (PICKY, False, False),
        (ONLY_FOR_TOOLS, False, False),
        (FAILS, False, False),
    ],
    ids=["as sent", "sorted", "names", "dated", "blind", "picky", "shown late", "fails"],
)
def test_equal_texts_of_tools_have_equal_digests(
    template: str, *, turned: bool, other: bool
) -> None:
    """Members in another order are the same tools only if the template shows them alike; where it
    shows none to a probe, the tools themselves count, and the date never does."""
    of = renderer_of(tokenizer_of(template), template)._digests.of
    first = of(ONE, {})
    assert of(ONE, {}) == first
    assert (of(TURNED, {}) == first) is turned
    assert (of(OTHER, {}) == first) is other
    assert of(ONE, {"enable_thinking": True}) != first
    assert of(ONE, {"a": 1, "b": 2}) == of(ONE, {"b": 2, "a": 1})
    assert of(None, {"a": {"x": 1, "y": 2}}) != of(None, {"a": {"y": 2, "x": 1}})
    renderer = renderer_of(tokenizer_of(template), template)
    assert renderer._digests.of(ONE, {}) == first, "another process finds the same"
