"""Histories that began at another provider: each of its items is shown, or left out, and none makes
the history unusable."""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import anthropic.types
import anthropic.types.beta
import openai.types.responses
import pytest
from anthropic_talks import mapped as mapped_messages
from hypothesis import given
from hypothesis import strategies as st
from support.responses_talks import chat, said

from leyline_proxy.apis.anthropic.history import BLOCKS
from leyline_proxy.apis.fields import FieldError
from leyline_proxy.apis.foreign import Rule, Treatment
from leyline_proxy.apis.responses.items import ITEMS

DOCS = Path(__file__).parents[3] / "docs" / "http-api.md"
SECRET = "E" * 400  # what only the provider can read
GO, NEXT = {"role": "user", "content": "Go."}, {"role": "user", "content": "Next."}
PAGE = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "Page."}}
PNG = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}


def of_union(union: Any) -> Iterator[str]:
    """The types of the members of an SDK's union: models, or typed dictionaries."""
    if typing.get_origin(union) is typing.Literal:
        yield from typing.get_args(union)
    elif isinstance(union, type) and hasattr(union, "model_fields"):
        yield from of_union(union.model_fields["type"].annotation)
    elif hasattr(union, "__required_keys__"):
        yield from of_union(typing.get_type_hints(union)["type"])
    else:
        for each in typing.get_args(union):
            yield from of_union(each)


@pytest.mark.parametrize(
    ("table", "unions"),
    [
        (
            BLOCKS,
            (
                anthropic.types.ContentBlock,
                anthropic.types.ContentBlockParam,
                anthropic.types.beta.BetaContentBlock,
                anthropic.types.beta.BetaContentBlockParam,
            ),
        ),
        (
            ITEMS,
            (
                openai.types.responses.ResponseInputItem,
                openai.types.responses.ResponseInputItemParam,
                openai.types.responses.ResponseItem,
                openai.types.responses.ResponseOutputItem,
            ),
        ),
    ],
)
def test_the_tables_have_every_type_of_the_sdks(
    table: Mapping[str, Rule], unions: tuple[Any, ...]
) -> None:
    """A type that an SDK gains or loses is noticed, and the documentation has each."""
    assert set(table) == {kind for union in unions for kind in of_union(union)}
    page = DOCS.read_text()
    for kind, rule in table.items():
        assert f"| `{kind}` | {rule.treatment} | {rule.why} |" in page


def block(kind: str, content: Any = None, **members: Any) -> dict[str, Any]:
    """A block of a server tool's result."""
    return {"type": kind, "tool_use_id": "s", "content": content, **members}


SHOWN_BLOCKS = [
    (
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "a"}},
        '[server_tool_use] web_search\n{"query":"a"}',
    ),
    (
        {"type": "mcp_tool_use", "id": "s", "name": "n", "server_name": "s", "input": {}},
        "[mcp_tool_use] n\ns\n{}",
    ),
    (
        block(
            "web_search_tool_result",
            [
                {
                    "type": "web_search_result",
                    "encrypted_content": SECRET,
                    "url": "https://a.example",
                    "title": "T",
                }
            ],
        ),
        "[web_search_tool_result] T\nhttps://a.example",
    ),
    (
        block("web_search_tool_result", {"type": "x", "error_code": "unavailable"}),
        "[web_search_tool_result] unavailable",
    ),
    (
        block("web_fetch_tool_result", {"type": "web_fetch_result", "url": "u", "content": PAGE}),
        "[web_fetch_tool_result] u\nPage.",
    ),
    (
        block("code_execution_tool_result", {"stdout": "1\n", "stderr": "", "return_code": 0}),
        "[code_execution_tool_result] 1\n",
    ),
    (
        block("bash_code_execution_tool_result", {"stdout": "", "stderr": "no", "return_code": 2}),
        "[bash_code_execution_tool_result] no\nreturn_code: 2",
    ),
    (
        block("text_editor_code_execution_tool_result", {"content": "aGk=", "file_type": "image"}),
        "[text_editor_code_execution_tool_result] [image]",
    ),
    (
        block(
            "tool_search_tool_result",
            {"tool_references": [{"type": "tool_reference", "tool_name": "ls"}]},
        ),
        "[tool_search_tool_result] ls",
    ),
    (
        block("mcp_tool_result", [{"type": "text", "text": "a"}, PNG], is_error=False),
        "[mcp_tool_result] a\n[image/png]",
    ),
    (block("advisor_tool_result", {"text": "Do it."}), "[advisor_tool_result] Do it."),
    (block("advisor_tool_result", {"encrypted_content": SECRET}), ""),
    ({"type": "container_upload", "file_id": "f"}, ""),
    ({"type": "redacted_thinking", "data": SECRET}, ""),
    ({"type": "mcp_tool_listing", "mcp_server_name": "s", "tools": [{"name": "n"}]}, ""),
    ({"type": "fallback", "from": {}, "to": {}}, ""),
    ({"type": "of_next_year", "title": "T", "data": SECRET, "text": SECRET}, "[of_next_year] T"),
    ({"type": "of_next_year", "id": "x"}, ""),
]


@pytest.mark.parametrize(("given_block", "shown"), SHOWN_BLOCKS)
def test_blocks_of_anthropics_servers_are_shown_or_left_out(
    given_block: dict[str, Any], shown: str
) -> None:
    """Between the model's own words they have lines of their own; data that only the provider can
    read, and pictures, are no text."""
    texts = [{"type": "text", "text": text} for text in ("I look.", "Well.")]
    answer = {"role": "assistant", "content": [texts[0], given_block, texts[1]]}
    got = mapped_messages([GO, answer, NEXT])["messages"]
    between = f"\n{shown}" + ("" if shown.endswith("\n") else "\n") if shown else ""
    assert got == [GO, {"role": "assistant", "content": f"I look.{between}Well."}, NEXT]
    alone = mapped_messages([GO, {"role": "assistant", "content": [given_block]}, NEXT])
    assert alone["messages"][1]["content"] == shown


def test_every_foreign_type_has_a_sample() -> None:
    """No rule goes untried."""
    for table, samples in ((BLOCKS, SHOWN_BLOCKS), (ITEMS, SHOWN_ITEMS)):
        tried = {each["type"] for each, _ in samples}
        foreign = {k for k, rule in table.items() if rule.treatment is not Treatment.MAPPED}
        assert foreign <= tried


SHOWN_ITEMS = [
    ({"type": "web_search_call", "id": "i", "action": {"query": "a"}}, ""),
    ({"type": "tool_search_call", "arguments": {}}, ""),
    ({"type": "tool_search_output", "tools": []}, ""),
    (
        {
            "type": "file_search_call",
            "queries": ["a"],
            "results": [{"file_id": "f", "filename": "n", "text": "b", "score": 1}],
        },
        "[file_search_call] a\nn\nb",
    ),
    (
        {
            "type": "code_interpreter_call",
            "container_id": "c",
            "code": "1+1",
            "outputs": [
                {"type": "logs", "logs": "2"},
                {"type": "image", "url": f"data:image/png;base64,{SECRET}"},
            ],
        },
        "[code_interpreter_call] 1+1\n2\n[image/png]",
    ),
    ({"type": "image_generation_call", "id": "i", "result": "AA=="}, ""),
    (
        {"type": "image_generation_call", "result": SECRET, "revised_prompt": "A cat."},
        "[image_generation_call] A cat.",
    ),
    (
        {"type": "mcp_call", "server_label": "s", "name": "n", "arguments": "{}", "output": "a"},
        "[mcp_call] n\ns\n{}\na",
    ),
    ({"type": "mcp_list_tools", "server_label": "s", "tools": []}, ""),
    (
        {"type": "mcp_approval_request", "server_label": "s", "name": "n", "arguments": "{}"},
        "[mcp_approval_request] n\ns\n{}",
    ),
    (
        {"type": "mcp_approval_response", "approve": False, "reason": "No."},
        "[mcp_approval_response] approve: false\nNo.",
    ),
    (
        {"type": "program", "id": "p", "call_id": "c", "code": "x()", "fingerprint": "f"},
        "[program] x()",
    ),
    ({"type": "program_output", "call_id": "c", "result": "1"}, "[program_output] 1"),
    ({"type": "configuration_update", "reasoning": {"effort": "low"}}, ""),
    ({"type": "of_next_year", "output": [{"text": "a"}], "data": "b"}, "[of_next_year] a"),
    ({"type": "of_next_year", "id": "x"}, ""),
]


@pytest.mark.parametrize(("item", "shown"), SHOWN_ITEMS)
def test_items_of_openais_servers_are_shown_or_left_out(item: dict[str, Any], shown: str) -> None:
    """They are in the answer's message; the user's decision is the user's."""
    got = chat([said("Go."), item, said("Well.", "assistant"), said("Next.")])
    if item["type"] == "mcp_approval_response":
        assert got[1:3] == [
            {"role": "user", "content": shown},
            {"role": "assistant", "content": "Well."},
        ]
    else:
        assert got[1] == {"role": "assistant", "content": f"{shown}\nWell." if shown else "Well."}
    assert len(got) == (4 if item["type"] == "mcp_approval_response" else 3)
    assert len(chat([said("Go."), item, said("Next.")])) == (3 if shown else 2)


def test_tools_that_a_client_carries_out_are_called() -> None:
    """Their results are results: with a text, a picture, or what came of it."""
    shell = {"action": {"commands": ["ls"]}, "environment": {"type": "local"}}
    patch = {"operation": {"type": "delete_file", "path": "a"}, "status": "completed"}
    screen = {"type": "computer_screenshot", "image_url": "data:image/png;base64,aGk="}
    stdout = {"stdout": "a", "stderr": "", "outcome": {"type": "exit", "exit_code": 1}}
    items = [
        {"type": "shell_call", "call_id": "a", **shell},
        {"type": "shell_call_output", "call_id": "a", "output": [stdout]},
        {"type": "apply_patch_call", "call_id": "b", **patch},
        {"type": "apply_patch_call_output", "call_id": "b", "status": "failed", "output": "No."},
        {"type": "computer_call", "call_id": "c", "action": {"type": "click", "x": 1}},
        {"type": "computer_call_output", "call_id": "c", "output": screen},
    ]
    got = chat([said("Go."), *items])
    called = [each["tool_calls"][0]["function"] for each in got if "tool_calls" in each]
    assert [(each["name"], each["arguments"]) for each in called] == [
        ("shell", '{"commands": ["ls"]}'),
        ("apply_patch", '{"type": "delete_file", "path": "a"}'),
        ("computer", '{"type": "click", "x": 1}'),
    ]
    results = [each for each in got if each["role"] == "tool"]
    assert [each["content"] for each in results[:2]] == ["a\nexit_code: 1", "failed\nNo."]
    picture = {"type": "image_url", "image_url": {"url": screen["image_url"]}}
    assert results[2]["content"] == [picture]
    assert [each["tool_call_id"] for each in results] == ["a", "b", "c"]


FILE = {"type": "document", "title": "T", "source": {"type": "file", "file_id": "f"}}
PARTS = [FILE, {"type": "container_upload", "file_id": "f"}, {"type": "of_next_year", "text": "a"}]


@pytest.mark.parametrize("part", PARTS)
def test_what_is_asked_now_is_never_lost_in_silence(part: dict[str, Any]) -> None:
    """A part that can't be read is refused until it has been answered; then it is history."""
    asked = {"role": "user", "content": [part]}
    with pytest.raises(FieldError):
        mapped_messages([asked])
    with pytest.raises(FieldError):
        mapped_messages([GO, {"role": "assistant", "content": "No."}, asked])
    later = mapped_messages([asked, {"role": "assistant", "content": "No."}, NEXT])
    assert len(later["messages"]) == 3  # templates want the user's turn
    given_file = {"type": "input_file", "file_id": "f", "filename": "n.txt"}
    with pytest.raises(FieldError):
        chat([{"role": "user", "content": [given_file]}])
    items = [{"role": "user", "content": [given_file]}, said("a", "assistant"), said("b")]
    assert chat(items)[0]["content"] == "[input_file] n.txt"


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["text", "content", "source", "input", "type", "url", "x", "approve"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)
KINDS = sorted(k for k, rule in (BLOCKS | ITEMS).items() if rule.treatment is not Treatment.MAPPED)
ANY = st.fixed_dictionaries(
    {"type": st.sampled_from([*KINDS, "new"])},
    optional=dict.fromkeys(("content", "input", "output", "source", "results", "role"), VALUES),
)


@given(ANY)
def test_no_item_of_a_history_makes_it_unusable(item: dict[str, Any]) -> None:
    """Whatever its members are, both APIs map it; and what was said before keeps its mapping."""
    history = [GO, {"role": "assistant", "content": [item]}]
    before = mapped_messages([*history, NEXT])["messages"]
    answer = {"role": "assistant", "content": "Well."}
    assert mapped_messages([*history, NEXT, answer, NEXT])["messages"][:3] == before
    items = chat([said("Go."), item, said("Next.")])
    assert (
        chat([said("Go."), item, said("Next."), said("a", "assistant"), said("b")])[:2] == items[:2]
    )
