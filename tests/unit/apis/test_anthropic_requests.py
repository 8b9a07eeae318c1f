"""Requests of the Messages API as chat requests."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import Any

import pytest
from anthropic_talks import CALLED, TOOL, USE, Talk, chat, mapped, result, talks, user
from hypothesis import given
from hypothesis import strategies as st

from leyline_policies.failures import is_failure
from leyline_proxy.apis.anthropic.request import map_request
from leyline_proxy.apis.fields import in_request
from leyline_proxy.model.messages import check_messages


@given(talks(), st.integers(0, 6), st.none() | st.just("Be terse."))
def test_what_was_said_before_keeps_its_mapping(talk: Talk, cut: int, system: str | None) -> None:
    """A conversation maps to what its beginning maps to and more, so an appended one stays an
    extension; each mapping is a message list that chat endpoints accept."""
    before = talk[: max(1, min(cut, len(talk)))]
    whole, beginning = chat(talk, system=system), chat(before, system=system)
    assert whole[: len(beginning)] == beginning
    assert check_messages(whole) == whole


@given(talks(), st.data())
def test_cache_markers_change_nothing(talk: Talk, data: st.DataObject) -> None:
    """They move from turn to turn; the mapping of what they mark doesn't."""
    marked = deepcopy(talk)
    for message in marked:
        if isinstance(message["content"], list):
            for block in message["content"]:
                if data.draw(st.booleans()):
                    block["cache_control"] = {"type": "ephemeral"}
    assert mapped(marked, cache_control={"type": "ephemeral"}) == mapped(talk)


@given(talks())
def test_every_chat_message_knows_where_it_comes_from(talk: Talk) -> None:
    """Places in the chat request are reported as places in the client's."""
    mapping = map_request({"max_tokens": 1, "messages": talk, "system": "S"})
    assert len(mapping.origins) == len(mapping.body["messages"])
    assert mapping.origins[0] == "system"
    last = len(mapping.origins) - 1
    assert in_request(f"messages[{last}].role", mapping.origins) == f"{mapping.origins[-1]}.role"
    assert in_request(f"messages[{last + 1}]", mapping.origins) == f"messages[{last + 1}]"


def test_one_text_is_a_string_and_several_are_parts() -> None:
    """A string and a single text block are one and the same message."""
    one, two = {"type": "text", "text": "a"}, {"type": "text", "text": "b"}
    assert chat(user(one)) == chat([{"role": "user", "content": "a"}])
    assert chat(user(one)) == [{"role": "user", "content": "a"}]
    assert chat(user(one, two)) == [{"role": "user", "content": [one, two]}]
    assert chat(user()) == [{"role": "user", "content": ""}]


def test_images_are_image_parts() -> None:
    """Base64 data becomes a data URL, a URL stays one; also in a tool's result."""
    raw = {"type": "base64", "media_type": "image/png", "data": "aGk="}
    link = {"type": "url", "url": "https://images.example/1.png"}
    blocks = [{"type": "image", "source": raw}, {"type": "image", "source": link}]
    parts = [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}},
        {"type": "image_url", "image_url": {"url": "https://images.example/1.png"}},
    ]
    assert chat(user(*blocks)) == [{"role": "user", "content": parts}]
    assert chat([*CALLED, result(content=blocks)])[-1]["content"] == parts


def test_an_assistants_blocks_are_one_message() -> None:
    """Texts and thinking are joined as they were generated, calls get their input as JSON."""
    content = [
        {"type": "thinking", "thinking": "Hm. ", "signature": "s"},
        {"type": "redacted_thinking", "data": "secret"},
        {"type": "thinking", "thinking": "Yes.", "signature": "s"},
        {"type": "text", "text": "I "},
        {"type": "text", "text": "look."},
        USE,
    ]
    (message,) = chat([{"role": "assistant", "content": content}])
    (call,) = message["tool_calls"]
    assert (message["content"], message["reasoning_content"]) == ("I look.", "Hm. Yes.")
    assert (call["id"], call["function"]["name"]) == ("t1", "ls")
    assert json.loads(call["function"]["arguments"]) == USE["input"]


def test_results_are_messages_of_their_own_in_their_order() -> None:
    """A message with results and texts becomes several: the results, then the rest as one."""
    second = {**USE, "id": "t2"}
    content = [
        {"type": "text", "text": "first"},
        {"type": "tool_result", "tool_use_id": "t2", "content": "two"},
        {"type": "tool_result", "tool_use_id": "t1"},
        {"type": "text", "text": "last"},
    ]
    talk = [{"role": "assistant", "content": [USE, second]}, {"role": "user", "content": content}]
    assert chat(talk)[1:] == [
        {"role": "tool", "tool_call_id": "t2", "content": "two"},
        {"role": "tool", "tool_call_id": "t1", "content": ""},
        {"role": "user", "content": [content[0], content[3]]},
    ]


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        ("no such file", "Error: no such file"),
        ("", "Error"),
        (None, "Error"),
        ("Traceback (most recent call last):", "Traceback (most recent call last):"),
        ('{"exit_code": 2}', '{"exit_code": 2}'),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "Error: a\nb"),
    ],
)
def test_a_failed_result_says_so(content: Any, shown: str) -> None:
    """Chat messages have no flag for it, so the text informs model and policies."""
    failed = chat([*CALLED, result(content=content, is_error=True)])[-1]
    fine = chat([*CALLED, result(content=content, is_error=False)])[-1]
    assert failed["content"] == shown
    assert is_failure(failed)
    assert "is_error" not in failed
    assert fine["content"] in (content, "", "a\nb")


def test_a_failed_result_with_an_image_says_so_before_it() -> None:
    """The parts stay what they are."""
    image = {"type": "image", "source": {"type": "url", "url": "https://images.example/1.png"}}
    (told, shown) = chat([*CALLED, result(content=[image], is_error=True)])[-1]["content"]
    assert (told["text"], shown["type"]) == ("Error", "image_url")


def test_documents_and_search_results_are_texts() -> None:
    """Their title comes before their content."""
    text = {"type": "text", "media_type": "text/plain", "data": "body"}
    nested = {"type": "content", "content": [{"type": "text", "text": "inner"}]}
    found = chat(
        user(
            {"type": "document", "source": text, "title": "T", "context": "C"},
            {"type": "document", "source": nested},
            {
                "type": "search_result",
                "title": "S",
                "source": "https://s.example",
                "content": [{"type": "text", "text": "hit"}],
            },
        )
    )
    texts = [part["text"] for part in found[0]["content"]]
    assert texts == ["T\nC\nbody", "inner", "S\nhttps://s.example\nhit"]


def test_the_system_prompt_is_one_message_without_the_attribution_line() -> None:
    """Claude Code's line for Anthropic's accounts changes with every request."""
    line = "x-anthropic-billing-header: cc_version=2.1; cch=%s;"
    blocks = ["You are terse.", "Be kind."]

    def prompt(nonce: str) -> list[dict[str, Any]]:
        texts = [{"type": "text", "text": text} for text in (line % nonce, *blocks)]
        return chat(user({"type": "text", "text": "a"}), system=texts)

    assert prompt("1f") == prompt("2e")
    assert prompt("1f")[0] == {"role": "system", "content": "You are terse.\nBe kind."}
    kept = chat([{"role": "user", "content": "a"}], system=f"{line}\nYou are terse.")
    assert kept[0]["content"] == "You are terse."
    for empty in ("", [], None, line):
        assert chat([{"role": "user", "content": "a"}], system=empty)[0]["role"] == "user"


def test_system_messages_stay_where_they_are() -> None:
    """Instructions that come later must not change how the prompt begins."""
    later = {"role": "system", "content": [{"type": "text", "text": "Stop."}]}
    assert chat([*CALLED[:1], later])[-1] == {"role": "system", "content": "Stop."}


def test_annotations_go_with_their_messages() -> None:
    """A message speaks for all that it becomes; a tool result may speak for itself."""
    blocks = [
        {"type": "tool_result", "tool_use_id": "t1", "content": "r", "leyline": {"evict": True}},
        {"type": "text", "text": "a"},
    ]
    talk = [*CALLED, {"role": "user", "content": blocks, "leyline": {"pin": True}}]
    assert [message.get("leyline") for message in chat(talk)[2:]] == [
        {"evict": True},
        {"pin": True},
    ]


def test_a_result_that_says_something_of_itself_takes_back_no_forget() -> None:
    """The message's demand holds for all that it becomes."""
    block = {"type": "tool_result", "tool_use_id": "t1", "content": "r", "leyline": {"tags": ["a"]}}
    talk = [*CALLED, {"role": "user", "content": [block], "leyline": {"forget": True}}]
    assert chat(talk)[2]["leyline"] == {"tags": ["a"], "forget": True}


@pytest.mark.parametrize(
    ("choice", "members"),
    [
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "any"}, {"tool_choice": "required"}),
        ({"type": "none"}, {"tool_choice": "none"}),
        (
            {"type": "tool", "name": "ls"},
            {"tool_choice": {"type": "function", "function": {"name": "ls"}}},
        ),
        (
            {"type": "auto", "disable_parallel_tool_use": True},
            {"tool_choice": "auto", "parallel_tool_calls": False},
        ),
        (None, {}),
    ],
)
def test_tools_and_the_choice_among_them(choice: Any, members: dict[str, Any]) -> None:
    """Custom tools are functions; what only Anthropic's servers use of them is left out."""
    tool = {
        **TOOL,
        "type": "custom",
        "description": "List.",
        "strict": True,
        "cache_control": {"type": "ephemeral"},
        "defer_loading": True,
    }
    body = mapped(CALLED, tools=[tool], tool_choice=choice)
    function = {
        "name": "ls",
        "description": "List.",
        "strict": True,
        "parameters": {"type": "object"},
    }
    assert body["tools"] == [{"type": "function", "function": function}]
    kept = {name: body[name] for name in ("tool_choice", "parallel_tool_calls") if name in body}
    assert kept == members


def test_a_choice_without_tools() -> None:
    """Leaving it to the model asks for nothing; chat servers refuse the member and empty lists."""
    body = mapped(CALLED, tools=[], tool_choice={"type": "auto"})
    assert body.keys() == {"model", "max_tokens", "messages"}


def test_options_have_their_chat_names() -> None:
    """Sampling and limits are passed on, members of the chat API as well."""
    body = mapped(
        CALLED,
        stop_sequences=["END"],
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        stream=True,
        seed=7,
        leyline={"policy": "keep_all"},
    )
    del body["messages"]
    assert body == {
        "model": "m",
        "max_tokens": 9,
        "stop": ["END"],
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "stream": True,
        "stream_options": {"include_usage": True},
        "seed": 7,
        "leyline": {"policy": "keep_all"},
    }


def test_what_is_between_client_and_anthropic_goes_nowhere() -> None:
    """Accounts, regions and cache markers are accepted; who the user is isn't sent on."""
    body = mapped(
        CALLED,
        metadata={"user_id": "someone"},
        service_tier="auto",
        inference_geo="eu",
        speed="fast",
        diagnostics={},
        betas=["x"],
        container=None,
        mcp_servers=[],
    )
    assert body.keys() == {"model", "max_tokens", "messages"}


@pytest.mark.parametrize(
    ("thinking", "wanted"),
    [
        ({"type": "enabled", "budget_tokens": 2048}, True),
        ({"type": "adaptive", "display": "omitted"}, True),
        ({"type": "disabled"}, False),
    ],
)
def test_thinking_is_asked_of_the_template(thinking: Any, wanted: bool) -> None:
    """The request has both names that templates have for it; the client's own setting stays."""
    kwargs = mapped(CALLED, thinking=thinking)["chat_template_kwargs"]
    assert kwargs == {"enable_thinking": wanted, "thinking": wanted}
    own = mapped(CALLED, thinking=thinking, chat_template_kwargs={"thinking": "low"})
    assert own["chat_template_kwargs"]["thinking"] == "low"
    assert "chat_template_kwargs" not in mapped(CALLED)


def test_effort_and_output_format() -> None:
    """They are the chat API's reasoning effort and response format."""
    schema = {"type": "object"}
    output = {"effort": "xhigh", "format": {"type": "json_schema", "schema": schema}}
    body = mapped(CALLED, output_config=output)
    assert body["reasoning_effort"] == "high"
    assert body["response_format"]["json_schema"]["schema"] == schema


def test_context_management_as_the_chat_route_takes_it() -> None:
    """Nulls are left out, and ``all`` may be an object; nothing asked for is no member."""
    edits = [{"type": "clear_thinking_20251015", "keep": {"type": "all"}, "trigger": None}]
    body = mapped(CALLED, context_management={"edits": edits})
    assert body["context_management"] == {
        "edits": [{"type": "clear_thinking_20251015", "keep": "all"}]
    }
    for nothing in (None, {}):
        assert "context_management" not in mapped(CALLED, context_management=nothing)


def test_counting_needs_no_limit() -> None:
    """It passes none on."""
    body = {"model": "m", "messages": CALLED, "max_tokens": 0}
    assert "max_tokens" not in map_request(body, runs=False).body
