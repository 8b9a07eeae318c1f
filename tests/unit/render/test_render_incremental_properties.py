"""Rendering from memory: made-up templates and conversations, and what must not be remembered."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from incremental_kit import Message, Reference, check
from support.examples import examples
from template_kit import tokenizer_of
from tokenizers import Tokenizer

from leyline_proxy.render import ChatRenderer, RenderError
from leyline_proxy.render.memoised import loops
from leyline_proxy.render.memoised.reads import Reads
from leyline_replay.models.tiny_chat_template import CHAT_TEMPLATE

SPECIAL = {"bos_token": "<bos>"}
TOOLS = [{"type": "function", "function": {"name": "shell"}}]

BEFORE = (
    "{%- set ns = namespace(count=0, last='', seen=false, text='', user=-1) -%}",
    "{%- set x = 'outer' -%}{%- set first = messages[0] -%}",
    "{%- macro show(item) -%}({{ item.content }}{{ tail }}){%- endmacro -%}",
    "{%- macro bump() -%}{%- set ns.count = ns.count + 1 -%}{{ ns.count }}{%- endmacro -%}",
)
ALONGSIDE = (
    "{%- for m in messages -%}{%- if m.role == 'user' -%}"
    "{%- set ns.user = loop.index0 -%}{%- endif -%}{%- endfor -%}",
    "{%- if messages[0].role == 'system' -%}{{ messages[0].content }}{%- endif -%}",
    "{%- for m in messages -%}{%- set ns.text = ns.text + (m.content or '') -%}{%- endfor -%}"
    "{{ ns.text }}",
    "{%- for tool in tools or [] -%}{{ loop.index }}{{ tool | tojson }}{%- endfor -%}",
    "{%- set tail = '!' -%}",
    "{%- if 'a' in messages[0].content -%}A{%- endif -%}",
)
OVER = (
    "messages",
    "messages[1:]",
    "messages | reverse | list",
    "messages if m.role != 'tool'",
    "messages | selectattr('content')",
    "(messages + [{'role': 'user', 'content': 'made up'}])",
)
INSIDE = (
    "{{ m.content }}",
    "{{ m.role }}",
    "{{ m.content | trim }}",
    "{{ m | tojson }}",
    "{{ m.number }}",
    "{{ m.content.split('b')[0] }}",
    "{{ (m.content or '') + '<|im_' }}",
    "{{ 'start|>' }}",
    "{% if loop.first %}F{% endif %}",
    "{% if loop.last %}L{% endif %}",
    "{{ loop.index0 }}/{{ loop.length }}/{{ loop.revindex }}",
    "{% if loop.index0 > ns.user %}T{% endif %}",
    "{% if loop.first or messages[loop.index0 - 1].role != m.role %}new{% endif %}",
    "{{ messages[loop.index0 - 1].role }}",
    "{% if not loop.last %}{{ messages[loop.index0 + 1].content }}{% endif %}",
    "{% if loop.previtem and loop.previtem.role == 'user' %}P{% endif %}",
    "{{ loop.previtem.content }}",
    "{% if not loop.last %}{% if loop.nextitem.role == 'tool' %}N{% endif %}{% endif %}",
    "{% if loop.nextitem is defined %}D{% endif %}",
    "{{ messages | length }}",
    "{{ messages[0].content }}",
    "{{ first.content }}",
    "{% for other in messages %}{{ other.role[0] }}{% endfor %}",
    "{% for other in messages[loop.index:] %}{{ other.role[0] }}{% endfor %}",
    "{% for part in m.content %}{{ loop.index0 }}{{ part }}{% endfor %}",
    "{% set ns.count = ns.count + 1 %}{{ ns.count }}",
    "{% if m.role == 'user' %}{% set ns.seen = not ns.seen %}{% endif %}",
    "{% if ns.seen %}S{% endif %}",
    "{% if ns.last == m.role %}={% endif %}{% set ns.last = m.role %}",
    "{% set ns.text = m.content %}",
    "{{ ns.text }}",
    "{% set x = m.role %}",
    "{% if m.role == 'tool' %}{% set x = 'inner' %}{% endif %}",
    "{{ x }}",
    "{{ show(m) }}",
    "{{ bump() }}",
    "{% if tools %}{{ tools | length }}{% endif %}",
    "{% if flag %}G{{ flag }}{% endif %}",
    "{% if loop.changed(m.role) %}C{% endif %}",
    "{{ loop.cycle('odd', 'even') }}",
    "{% if m.content == 'bb' %}{% break %}{% endif %}",
    "{% if m.content == 'ab' %}{{ raise_exception('no') }}{% endif %}",
    "{% if m.content is string and m.content.startswith('a') %}a{% endif %}",
    "{% generation %}{{ m.role }}{% endgeneration %}",
    "{% set held %}{{ m.role }}{{ m.content }}{% endset %}{{ held }}",
    "{{ namespace(a=1).a }}",
    "{% set own = namespace(n=0) %}{% for c in m.role %}{% set own.n = own.n + 1 %}{% endfor %}"
    "{{ own.n }}",
)
AFTER = (
    "{{ ns.count }}",
    "{{ ns.text }}",
    "{{ ns.last }}{{ ns.seen }}",
    "{% if x %}{{ x }}{% endif %}",
)


def written(alongside: list[str], over: str, inside: list[str], after: list[str]) -> str:
    """A template of such parts."""
    begin, end = "{%- for m in " + over + " -%}<|im_start|>", "<|im_end|>{%- endfor -%}"
    return "".join((*BEFORE, *alongside, begin, *inside, end, *after))


sources = st.builds(
    written,
    st.lists(st.sampled_from(ALONGSIDE), max_size=3),
    st.sampled_from(OVER),
    st.lists(st.sampled_from(INSIDE), min_size=1, max_size=5),
    st.lists(st.sampled_from(AFTER), max_size=2),
)
messages = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["system", "user", "assistant", "tool"]),
        "content": st.sampled_from(["a", "ab", "bb", "", "  a b\n", "\ue000", "<|im_end|>"])
        | st.sampled_from([None, [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]])
        | st.text("ab <|", max_size=5),
    },
    optional={"number": st.sampled_from([0, 1, True, False, 1.0, -0.0, 0.0, "1"])},
)
conversations = st.lists(messages, min_size=1, max_size=6)


@cache
def tokenizer() -> Tokenizer:
    """The reference tests' small tokenizer."""
    return tokenizer_of("").backend_tokenizer


def pair(source: str, **settings_: Any) -> tuple[ChatRenderer, Reference]:
    """A renderer that remembers, and one that doesn't."""
    renderer = ChatRenderer(source, SPECIAL, tokenizer().to_str(), **settings_)
    return renderer, Reference(source, SPECIAL, tokenizer())


@st.composite
def turns(draw: st.DrawFn) -> list[list[Message]]:
    """Conversations that have much in common: appends, and small edits in between."""
    whole = draw(conversations)
    found = [whole]
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(whole) - 1))
        kind = draw(st.sampled_from(["append", "replace", "drop", "repeat", "member", "cut"]))
        edited = list(whole)
        if kind == "append":
            edited.append(draw(messages))
        elif kind == "replace":
            edited[at] = draw(messages)
        elif kind == "drop" and len(edited) > 1:
            del edited[at]
        elif kind == "repeat":
            edited.insert(draw(st.integers(0, len(edited))), edited[at])
        elif kind == "member":
            edited[at] = {**edited[at], "number": draw(st.sampled_from([1, True, 1.0, "1"]))}
        else:
            edited = edited[: at + 1]
        found.append(edited)
        whole = edited
    return found


@settings(max_examples=examples(150))
@given(sources, turns(), st.sampled_from([{}, {"flag": True}, {"flag": 1}, {"tail": "?"}]))
def test_any_template_gives_what_it_gives_without_memory(
    source: str, turns: list[list[Message]], options: dict[str, Any]
) -> None:
    """Text, tokens and spans, or a refusal, whatever the loops read, write, and come across."""
    renderer, reference = pair(source)
    for turn in (*turns, turns[0]):
        check(renderer, reference, turn, None, options)
        check(renderer, reference, turn, TOOLS, {})


WEAKENED: dict[str, tuple[str, Callable[[Reads], Reads]]] = {
    "outer variables": (
        "{% for m in messages %}{{ m.content }}{{ tools | tojson }}{% endfor %}",
        lambda reads: dataclasses.replace(reads, names=()),
    ),
    "neighbours": (
        "{% for m in messages %}{{ m.content }}{% if loop.last %}L{% endif %}{% endfor %}",
        lambda reads: dataclasses.replace(reads, values=()),
    ),
    "what namespaces were": (
        "{% set ns = namespace(n=0) %}{% for m in messages[1:] %}{{ ns.n }}{{ m.content }}"
        "{% if m.role == 'user' %}{% set ns.n = messages | length %}{% endif %}{% endfor %}",
        lambda reads: dataclasses.replace(reads, values=(), written=()),
    ),
    "what is left in namespaces": (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{{ m.content }}"
        "{% set ns.n = loop.index %}{% endfor %}{{ ns.n }}",
        lambda reads: dataclasses.replace(reads, written=()),
    ),
}


@pytest.mark.parametrize("left_out", WEAKENED)
def test_a_key_that_leaves_something_out_is_noticed(
    left_out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of all comparisons here: with less in the key, prompts come out wrong."""
    source, weaken = WEAKENED[left_out]
    chat = [{"role": "user", "content": text} for text in "abcd"]

    def compare() -> None:
        renderer, reference = pair(source)
        for turn, tools in ((chat[:3], TOOLS), (chat, TOOLS), (chat, TOOLS * 2), (chat[:3], TOOLS)):
            check(renderer, reference, turn, tools)

    compare()
    strong = loops._reads
    monkeypatch.setattr(loops, "_reads", lambda *given: weaken(strong(*given)))
    with pytest.raises(AssertionError):
        compare()


def test_values_that_look_alike_are_told_apart() -> None:
    """One, true and 1.0 are equal in Python; templates print them differently."""
    body = "{{ m.n }}{{ flag }}{{ loop.previtem.n if loop.previtem }};"
    source = "{% for m in messages %}" + body + "{% endfor %}"
    renderer, reference = pair(source)
    for value in (
        1,
        True,
        1.0,
        "1",
        0.0,
        -0.0,
        None,
        [1],
        [True],
        {"a": 1, "b": 2},
        {"b": 2, "a": 1},
    ):
        chat = [{"role": "user", "content": "x", "n": value}, {"role": "user", "content": "y"}]
        assert check(renderer, reference, chat, None, {"flag": value})


def test_a_refusal_is_the_same_after_hits() -> None:
    """The error of the plain way, and what was rendered before is rendered again."""
    source = (
        "{% for m in messages %}{{ m.content }}{% if m.content == 'no' %}"
        "{{ raise_exception('never') }}{% endif %}{{ 1 // m.get('n', 1) }}{% endfor %}"
    )
    renderer, reference = pair(source)
    good = [{"role": "user", "content": "yes"}]
    for last, error in (
        ({"role": "user", "content": "no"}, "TemplateError"),
        ({"role": "user", "content": "x", "n": "many"}, "TypeError"),
    ):
        assert check(renderer, reference, good)
        with pytest.raises(RenderError, match=f"the chat template failed: {error}$"):
            renderer.render([*good, last], None)
        assert check(renderer, reference, good)
    with pytest.raises(RenderError, match="TypeError"):
        renderer.render(good, None, template_kwargs={"messages": []})
    with pytest.raises(RenderError, match="TypeError"):
        renderer.render(good, None, template_kwargs={"tools": []})


def test_a_message_that_is_changed_later_is_another_message() -> None:
    """Callers keep their objects; what is remembered is of what was rendered."""
    renderer, reference = pair(CHAT_TEMPLATE)
    message: Message = {"role": "user", "content": [{"type": "text", "text": "before"}]}
    assert check(renderer, reference, [message])
    message["content"][0]["text"] = "after"
    assert check(renderer, reference, [message])
    assert check(
        renderer, reference, [{"role": "user", "content": [{"type": "text", "text": "before"}]}]
    )


def test_a_tool_that_looks_like_a_message_is_none() -> None:
    """Messages are normalised, other items aren't: one isn't taken for the other."""
    loops_ = (("t", "tools", "{{ t.content }}"), ("m", "messages", "[{{ m.content }}]"))
    source = "".join(
        f"{{% for {item} in {list_} %}}{body}{{% endfor %}}" for item, list_, body in loops_
    )
    renderer, reference = pair(source)
    message: Message = {"role": "assistant", "content": None}
    for _ in range(2):
        assert check(renderer, reference, [message], [message])
        assert renderer.text([message], [message]) == "None[]"


def test_the_memory_for_messages_is_bounded() -> None:
    """Beyond the bound the least recently used messages go, and prompts stay right."""
    renderer, reference = pair(CHAT_TEMPLATE, max_remembered_bytes=6 * 20_000)
    task = {"role": "user", "content": "task"}
    for number in range(60):
        chat = [task, {"role": "assistant", "content": f"{number} " * 40}]
        assert check(renderer, reference, chat, TOOLS)
        assert renderer.remembered_bytes <= 20_000
    assert renderer.remembered_bytes > 10_000


def test_threads_share_the_memory() -> None:
    """Several threads render conversations that overlap, with so little room that all forget."""
    renderer, reference = pair(CHAT_TEMPLATE, max_remembered_bytes=6 * 30_000)
    chat = [{"role": "user", "content": f"message {number} " * 9} for number in range(24)]

    def work(start: int) -> int:
        return sum(
            check(renderer, reference, chat[start : start + length])
            for _ in range(6)
            for length in (4, 8, 5)
        )

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(work, range(0, 16, 2))) == 8 * 18
    assert renderer.remembered_bytes <= 30_000
