"""Requests of the Responses API as chat requests."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.responses_talks import (
    BODIES,
    NAMES,
    TEXT,
    TOOLS,
    answers,
    called,
    chat,
    gave,
    mapped,
    said,
    whole,
)

from leyline_proxy.apis.fields import FieldError, in_request
from leyline_proxy.apis.responses.native import NativeResponses
from leyline_proxy.apis.responses.request import (
    input_items,
    map_request,
    previous_id,
    references,
    resolved,
    stores,
)
from leyline_proxy.model.messages import check_messages


@given(BODIES)
def test_any_json_is_mapped_or_refused_by_its_field(body: dict[str, Any]) -> None:
    """No request crashes the mapping; what is refused says which of its members is to blame."""
    try:
        items = input_items(body)
        known = {identifier: said("a") for identifier in references(items)}
        stores(body)
        previous_id(body)
        mapping = map_request(body, resolved(items, known))
    except FieldError as error:
        assert error.param.partition("[")[0].partition(".")[0] in NAMES
        assert error.param.split("[")[0].split(".")[0] in str(error)
        return
    assert len(mapping.origins) == len(mapping.body["messages"])


@st.composite
def talks(draw: st.DrawFn) -> list[dict[str, Any]]:
    """A conversation in which every call has its output."""
    items: list[dict[str, Any]] = [said("Go.")]
    for turn in range(draw(st.integers(1, 3))):
        answer = whole(draw(answers()), key=f"{turn:032x}")
        items += answer["output"]
        for item in answer["output"]:
            if "call_id" in item:
                kind = item["type"]
                items.append(gave(draw(TEXT), item["call_id"], kind))
        if draw(st.booleans()):
            items.append(said(draw(TEXT), draw(st.sampled_from(["user", "developer"]))))
    return items


@given(talks(), st.data())
def test_what_was_said_before_keeps_its_mapping(
    items: list[dict[str, Any]], data: st.DataObject
) -> None:
    """A conversation maps to what its beginning maps to and more, whether it is resent or the
    beginning is stored; each mapping is a message list that chat endpoints accept."""
    ends = [i for i, item in enumerate(items) if item.get("role") == "user"] + [len(items)]
    cut = data.draw(st.sampled_from(ends))
    everything = chat(items)
    body = {"input": items[cut:], "previous_response_id": "resp_1"}
    parted = map_request(body, items[cut:], items[:cut])
    assert parted.body["messages"] == everything
    if cut:
        beginning = chat(items[:cut])
        assert everything[: len(beginning)] == beginning
    assert check_messages(everything) == everything


def test_a_string_is_what_the_user_says() -> None:
    """It becomes a user message, with the instructions before it."""
    assert chat("Hi.", instructions="Be terse.") == [
        {"role": "system", "content": "Be terse."},
        {"role": "user", "content": "Hi."},
    ]


def test_system_messages_at_the_beginning_are_one() -> None:
    """Instructions and what developers say; a later one stays in its place, and so does one of
    which something is said."""
    parts = [{"type": "input_text", "text": "b"}, {"type": "input_text", "text": "c"}]
    developer = {"type": "message", "role": "developer", "content": parts}
    talk = [developer, said("Hi."), said("Stop.", "developer")]
    assert chat(talk, instructions="a") == [
        {"role": "system", "content": "a\n\nb\nc"},
        {"role": "user", "content": "Hi."},
        {"role": "system", "content": "Stop."},
    ]
    pinned = {**said("b", "system"), "leyline": {"pin": True}}
    found = chat([pinned, said("Hi.")], instructions="a")
    assert [message["content"] for message in found] == ["a", "b", "Hi."]


def test_content_parts() -> None:
    """One text is a string; images, files and sounds are what chat has for them."""
    picture = {"type": "input_image", "image_url": "data:image/png;base64,aGk=", "detail": "low"}
    paper = {"type": "input_file", "file_data": "data:text/plain;base64,aGk=", "filename": "a.txt"}
    sound = {"type": "input_audio", "input_audio": {"data": "aGk=", "format": "wav"}}
    content = [{"type": "input_text", "text": "a"}, picture, paper, sound]
    (message,) = chat([{"role": "user", "content": content}])
    assert message["content"] == [
        {"type": "text", "text": "a"},
        {"type": "image_url", "image_url": {"url": picture["image_url"], "detail": "low"}},
        {"type": "file", "file": {"file_data": paper["file_data"], "filename": "a.txt"}},
        sound,
    ]
    assert chat([{"role": "user", "content": content[:1]}])[0]["content"] == "a"
    shown = chat([said("Go."), called(), gave([content[0], picture])])[2]["content"]
    assert [part["type"] for part in shown] == ["text", "image_url"]
    assert chat([said("Go."), called(), gave([content[0], content[0]])])[2]["content"] == "a\na"


def test_reasoning_belongs_to_the_answer_that_it_led_to() -> None:
    """It comes from its text, or a summary of it; text that only OpenAI can decrypt is left out."""
    thought = {"type": "reasoning", "id": "rs_1", "summary": []}
    text = {"content": [{"type": "reasoning_text", "text": "Hm."}]}
    summary = {"summary": [{"type": "summary_text", "text": "Hm."}]}
    for member in (text, summary):
        found = chat([said("Go."), {**thought, **member}, called()])[1]
        assert found["reasoning_content"] == "Hm."
        assert [call["id"] for call in found["tool_calls"]] == ["c1"]
    sealed = {**thought, "encrypted_content": "gAAAAB"}
    broken = {**thought, "encrypted_content": "leyline-reasoning-1:%%"}
    assert "reasoning_content" not in chat([said("Go."), sealed, called()])[1]
    assert chat([said("Go."), sealed, broken]) == [{"role": "user", "content": "Go."}]


def test_answers_without_ids_are_told_apart_by_their_order() -> None:
    """A second message begins another answer, and so does reasoning after a message."""
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]}
    two = chat([said("Go."), said("a", "assistant"), said("b", "assistant")])
    assert [message["content"] for message in two] == ["Go.", "a", "b"]
    two = chat([said("Go."), said("a", "assistant"), thought, said("b", "assistant")])
    assert [message.get("reasoning_content") for message in two] == [None, None, "Hm."]


def test_tools_are_functions() -> None:
    """Custom ones take a string, those in a namespace carry its name, and what only OpenAI's
    servers run is left out."""
    found = mapped(tools=TOOLS).body["tools"]
    functions = {tool["function"]["name"]: tool["function"] for tool in found}
    assert list(functions) == ["ls", "patch", "crm__find", "local_shell"]
    assert functions["patch"]["parameters"]["properties"] == {"input": {"type": "string"}}
    assert functions["local_shell"]["parameters"]["required"] == ["command"]
    lark = {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'}
    custom = {"type": "custom", "name": "p", "description": "Patches.", "format": lark}
    (tool,) = mapped(tools=[custom]).body["tools"]
    assert tool["function"]["description"].startswith("Patches.\n\n")
    assert tool["function"]["description"].endswith('start: "a"')
    assert "tools" not in mapped(tools=[TOOLS[-1]], parallel_tool_calls=True).body


def test_tools_may_come_with_the_input() -> None:
    """Some agents send them so; the item is no message."""
    item = {"type": "additional_tools", "role": "developer", "tools": TOOLS[:1]}
    mapping = mapped(input=[item, said("Go.")])
    assert [tool["function"]["name"] for tool in mapping.body["tools"]] == ["ls"]
    assert len(mapping.body["messages"]) == 1


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("auto", "auto"),
        ("required", "required"),
        ({"type": "function", "name": "ls"}, "ls"),
        ({"type": "custom", "name": "patch"}, "patch"),
        ({"type": "function", "name": "find", "namespace": "crm"}, "crm__find"),
        ({"type": "local_shell"}, "local_shell"),
    ],
)
def test_the_choice_of_a_tool(choice: Any, expected: str) -> None:
    """The choice has the name that the engine knows it by."""
    found = mapped(tools=TOOLS, tool_choice=choice).body["tool_choice"]
    name = found if isinstance(found, str) else found["function"]["name"]
    assert name == expected


def test_allowed_tools_are_the_only_ones() -> None:
    """The others aren't shown to the model."""
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "custom"}]}
    allowed["tools"] = [{"type": "custom", "name": "patch"}]
    body = mapped(tools=TOOLS, tool_choice=allowed).body
    assert [tool["function"]["name"] for tool in body["tools"]] == ["patch"]
    assert body["tool_choice"] == "required"


def test_settings_of_the_answer() -> None:
    """Each under its name in the chat API; what is between a client and OpenAI stays here."""
    schema = {"type": "object"}
    body = mapped(
        max_output_tokens=9,
        temperature=0.5,
        top_p=0.9,
        parallel_tool_calls=False,
        tools=TOOLS,
        text={
            "format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True},
            "verbosity": "low",
        },
        reasoning={"effort": "xhigh", "summary": "auto"},
        metadata={"a": "b"},
        user="u",
        prompt_cache_key="k",
        store=False,
        service_tier="flex",
        include=["reasoning.encrypted_content"],
        client_metadata={"a": "b"},
        stream=True,
        seed=3,
    ).body
    shaped = {"name": "n", "strict": True, "schema": schema}
    for name in ("messages", "tools"):
        del body[name]
    assert body == {
        "model": "m",
        "max_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.9,
        "parallel_tool_calls": False,
        "response_format": {"type": "json_schema", "json_schema": shaped},
        "reasoning_effort": "high",
        "metadata": {"a": "b"},
        "user": "u",
        "prompt_cache_key": "k",
        "stream": True,
        "stream_options": {"include_usage": True},
        "seed": 3,
    }
    quiet = mapped(reasoning={"effort": "none"}).body["chat_template_kwargs"]
    assert quiet == {"enable_thinking": False, "thinking": False}
    as_json = mapped(text={"format": {"type": "json_object"}}).body
    assert as_json["response_format"] == {"type": "json_object"}


_GO = [said("Go.")]


@pytest.mark.parametrize(
    ("param", "members"),
    [
        ("input", {"input": None}),
        ("input", {"input": 3}),
        ("input", {"input": []}),
        ("input[0]", {"input": [3]}),
        ("input[0]", {"input": [{"content": "a"}]}),
        ("input[1].role", {"input": [*_GO, {"role": "tool", "content": "a"}]}),
        ("input[0].content", {"input": [{"role": "user", "content": 3}]}),
        ("input[0].content[0].text", {"input": [said(3)]}),  # type: ignore[arg-type]
        ("input[0].content[0].type", {"input": [{"role": "user", "content": [{"type": "x"}]}]}),
        (
            "input[0].content[0].image_url",
            {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
        ),
        (
            "input[0].content[0].file_data",
            {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]},
        ),
        ("input[0].call_id", {"input": [{"type": "computer_call"}]}),
        (
            "input[0].encrypted_content",
            {"input": [{"type": "compaction", "encrypted_content": "leyline-compaction-1.a"}]},
        ),
        ("input[0].encrypted_content", {"input": [{"type": "compaction"}]}),
        ("input[1].call_id", {"input": [*_GO, gave("1", 3)]}),  # type: ignore[arg-type]
        ("input[1].call_id", {"input": [*_GO, called(call_id=3)]}),  # type: ignore[arg-type]
        ("input[1].arguments", {"input": [*_GO, called(arguments={})]}),
        ("instructions", {"instructions": 3}),
        ("tools", {"tools": 3}),
        ("tools[0]", {"tools": [3]}),
        ("tools[0].type", {"tools": [{"type": "file_search"}]}),
        ("tools[0].type", {"tools": [{"type": "mcp"}]}),
        ("tools[0].name", {"tools": [{"type": "function"}]}),
        ("tools[0].parameters", {"tools": [{**TOOLS[0], "parameters": []}]}),
        ("tools[1].name", {"tools": [TOOLS[0], {"type": "custom", "name": "ls"}]}),
        ("tools[0].tools", {"tools": [{"type": "namespace", "name": "n"}]}),
        ("tool_choice", {"tool_choice": "some"}),
        ("tool_choice", {"tool_choice": "required"}),
        ("tool_choice", {"tools": TOOLS, "tool_choice": {"type": "function", "name": "gone"}}),
        ("tool_choice.type", {"tools": TOOLS, "tool_choice": {"type": "web_search"}}),
        ("max_output_tokens", {"max_output_tokens": -1}),
        ("max_output_tokens", {"max_output_tokens": True}),
        ("reasoning", {"reasoning": "high"}),
        ("reasoning.effort", {"reasoning": {"effort": "huge"}}),
        ("text", {"text": "json"}),
        ("text.format", {"text": {"format": {"type": "json_schema"}}}),
        ("truncation", {"truncation": "middle"}),
        ("include", {"include": "all"}),
        ("context_management[0].type", {"context_management": [{"type": "clear"}]}),
        ("background", {"background": True}),
        ("conversation", {"conversation": "conv_1"}),
        ("prompt", {"prompt": {"id": "pmpt_1"}}),
    ],
)
def test_a_mistake_is_named_by_its_field(param: str, members: dict[str, Any]) -> None:
    """The error's message names it, too."""
    with pytest.raises(FieldError) as refused:
        mapped(**members)
    assert refused.value.param == param
    assert param.removesuffix(".type") in str(refused.value)


@pytest.mark.parametrize(
    ("read", "body"), [(stores, {"store": 1}), (previous_id, {"previous_response_id": 1})]
)
def test_a_mistake_about_storing_is_named(read: Any, body: dict[str, Any]) -> None:
    """It is named before anything is looked up."""
    with pytest.raises(FieldError) as refused:
        read(body)
    assert [refused.value.param] == list(body)


def test_references_stand_for_items() -> None:
    """They come with their type or without; an unknown one is missing, not wrong."""
    items: list[Any] = [{"type": "item_reference", "id": "a"}, said("b"), {"id": "c"}]
    assert references(items) == ["a", "c"]
    known = {"a": said("1"), "c": said("3")}
    assert resolved(items, known) == [said("1"), said("b"), said("3")]
    with pytest.raises(FieldError) as lost:
        resolved(items, {"a": said("1")})
    assert (lost.value.param, lost.value.missing) == ("input[2].id", True)


def test_places_are_told_as_the_client_knows_them() -> None:
    """Engine and proxy speak of chat messages."""
    mapping = mapped(input=[said("a"), called(), gave("1")], instructions="S")
    assert mapping.origins == ("instructions", "input[0]", "input[1]", "input[2]")
    assert in_request("messages[2].content: no", mapping.origins) == "input[1].content: no"
    assert in_request("messages[9]", mapping.origins) == "messages[9]"


def test_what_is_said_of_an_item_is_said_of_its_message() -> None:
    """The member ``leyline``."""
    note = {"leyline": {"tags": ["a"]}}
    talk = [{**said("Go."), **note}, {**called(), **note}, {**gave("1"), **note}]
    assert [message.get("leyline") for message in chat(talk)] == [note["leyline"]] * 3


def test_a_part_says_nothing_of_itself() -> None:
    """Only items become messages; a demand of less than one is refused."""
    part = {"type": "input_text", "text": "a", "leyline": {"forget": True}}
    with pytest.raises(FieldError, match="leyline") as caught:
        mapped(input=[{"role": "user", "content": [part]}])
    assert caught.value.param == "input[0].content[0].leyline"


@pytest.mark.parametrize("place", [0, 1])
def test_no_item_of_an_answer_takes_back_what_another_demands(place: int) -> None:
    """Several items become one message, and it is forgotten where one of them says so."""
    items = [{**called(call_id=f"c{number}"), "leyline": {"tags": ["a"]}} for number in range(2)]
    items[place]["leyline"] = {"forget": True}
    assert chat([said("a"), *items])[1]["leyline"]["forget"] is True


def test_calls_of_openais_own_tools_are_left_out() -> None:
    """A conversation may have begun elsewhere."""
    search = {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {}}
    assert chat([said("Go."), search, said("a", "assistant")]) == chat(
        [said("Go."), said("a", "assistant")]
    )


@pytest.mark.parametrize(
    "item",
    [
        {"type": "item_reference", "id": "msg_1"},
        {"role": "user", "content": [{"type": "input_file", "file_data": "x", "file_id": "f"}]},
        {"role": "user", "content": [{"type": "input_image", "image_url": "x", "file_id": "f"}]},
        {
            "type": "function_call_output",
            "call_id": "c",
            "output": [{"type": "input_image", "image_url": "x", "file_id": "f"}],
        },
    ],
)
def test_what_refers_to_stored_objects_doesnt_pass_as_it_is(item: dict[str, Any]) -> None:
    """Upstream, all tenants are one, and would find each other's."""
    plain = {"role": "user", "content": [{"type": "input_text", "text": "Hi."}]}
    api = NativeResponses()
    assert api.passes({"store": False, "input": [plain]})
    assert api.passes({"store": False, "input": "Hi."})
    assert not api.passes({"store": False, "input": [plain, item]})


@pytest.mark.parametrize(
    "item", [{"type": "item_reference", "id": "msg_1"}, {"id": "msg_1"}, {"type": None, "id": "x"}]
)
def test_a_reference_to_what_is_stored_isnt_the_upstreams_to_resolve(item: dict[str, str]) -> None:
    """It would find there what any tenant stored."""
    assert not NativeResponses().passes({"store": False, "input": [item]})
    message = {"role": "user", "content": "Hi", "id": "msg_2"}
    assert NativeResponses().passes({"store": False, "input": [message]})
