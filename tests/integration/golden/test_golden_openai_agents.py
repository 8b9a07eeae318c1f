"""tool_output_trimmer beside the OpenAI Agents SDK's ToolOutputTrimmer, on recorded sessions."""

from __future__ import annotations

import copy
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from agents.extensions.tool_output_trimmer import ToolOutputTrimmer as Original
from agents.run_config import CallModelData, ModelInputData
from hypothesis import given
from hypothesis import strategies as st

from leyline_policies import Message, pair_calls
from leyline_policies.builtin.tool_output_trimmer import ToolOutputTrimmer
from leyline_policies.context import Context, apply

FILES = (
    "sessions_mini_swe_deepseek.jsonl.gz",
    "sessions_openhands_codeact.jsonl.gz",
    "sessions_swe_agent.jsonl.gz",
    "sessions_tau2_bench.jsonl.gz",
    "sessions_tau_bench.jsonl.gz",
)
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"recent_turns": 1, "max_output_chars": 100, "preview_chars": 20},
    {"recent_turns": 1, "max_output_chars": 60, "preview_chars": 0},
    {"recent_turns": 3, "max_output_chars": 250, "trimmable_tools": ("get_user_details",)},
)
TEXT, IMAGE, FILE = "input_text", "input_image", "input_file"


def _sessions(path: Path) -> list[list[Message]]:
    """The sessions, with a user message now and then where an agent works without one."""
    return [_with_turns(_with_own_ids(session)) for session in _recorded(path)]


def _recorded(path: Path) -> list[list[Message]]:
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line)["messages"] for line in lines]


def _with_own_ids(messages: list[Message]) -> list[Message]:
    """The session with an id of its own for each call; some recorded ones use ids again."""
    renamed = copy.deepcopy(messages)
    for number, call in enumerate(pair_calls(messages)):
        renamed[call.message]["tool_calls"][call.position]["id"] = f"call_{number}"
        for index in call.results:
            renamed[index]["tool_call_id"] = f"call_{number}"
    return renamed


def _with_turns(messages: list[Message]) -> list[Message]:
    if sum(message["role"] == "user" for message in messages) > 2:
        return messages
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    turned: list[Message] = []
    for index, message in enumerate(messages):
        if index in answers[9::10]:
            turned.append({"role": "user", "content": "Go on."})
        turned.append(message)
    return turned


def _to_items(messages: list[Message]) -> list[Any]:
    """Chat messages as items of the Responses API."""
    items: list[Any] = []
    for message in messages:
        if message["role"] == "tool":
            output = message["content"]
            if isinstance(output, list):
                output = [_to_item_part(part) for part in output]
            call_id = message["tool_call_id"]
            items.append({"type": "function_call_output", "call_id": call_id, "output": output})
            continue
        items.append({"role": message["role"], "content": message["content"]})
        for call in message.get("tool_calls") or ():
            body = {"call_id": call["id"], **call["function"]}
            items.append({"type": "function_call", **body})
    return items


def _to_item_part(part: dict[str, Any]) -> dict[str, Any]:
    if part["type"] == "image_url":
        image = part["image_url"]
        detail = {"detail": image["detail"]} if "detail" in image else {}
        return {"type": IMAGE, "image_url": image["url"], **detail}
    if part["type"] == "file":
        return {"type": FILE, **part["file"]}
    return {"type": TEXT, "text": part["text"]}


def _to_chat(items: list[Any], messages: list[Message]) -> list[Message]:
    """The items as chat messages again; an output that is still a part list is a chat's own."""
    outputs = [item for item in items if item.get("type") == "function_call_output"]
    results = [message for message in messages if message["role"] == "tool"]
    contents = {}
    for message, item in zip(results, outputs, strict=True):
        assert item["call_id"] == message["tool_call_id"]
        kept = isinstance(item["output"], list)
        contents[id(message)] = message["content"] if kept else item["output"]
    chat = [
        {**message, "content": contents[id(message)]} if message["role"] == "tool" else message
        for message in messages
    ]
    assert items == _to_items(chat)
    return chat


def _original(messages: list[Message], settings: dict[str, Any]) -> list[Message]:
    data = ModelInputData(input=_to_items(copy.deepcopy(messages)), instructions=None)
    call = CallModelData(model_data=data, agent=None, context=None)  # type: ignore[arg-type]
    return _to_chat(list(Original(**settings)(call).input), messages)


def _ours(messages: list[Message], settings: dict[str, Any]) -> list[Message]:
    return apply(ToolOutputTrimmer(**settings), messages, 0, Context())


def _prefixes(messages: list[Message]) -> list[list[Message]]:
    """Requests of a session: some of its beginnings that end before an answer."""
    ends = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i]
    wanted = {ends[len(ends) * part // 8] for part in range(8)}
    return [*(messages[:end] for end in sorted(wanted)), messages]


def _requests(path: Path) -> list[list[Message]]:
    return [messages for session in _sessions(path) for messages in _prefixes(session)]


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_openai_agents_trims_the_same(
    traces_dir: Path, file: str, settings: dict[str, Any]
) -> None:
    """At every request of every session, both send the same messages."""
    for messages in _requests(traces_dir / file):
        assert _ours(messages, settings) == _original(messages, settings)


parts = st.lists(
    st.one_of(
        st.builds(lambda text: {"type": "text", "text": text}, st.text("ab \n", max_size=60)),
        st.builds(
            lambda size, more: {"type": "image_url", "image_url": {"url": "d" * size, **more}},
            st.integers(0, 80),
            st.sampled_from([{}, {"detail": "low"}]),
        ),
        st.builds(
            lambda size, more: {"type": "file", "file": {"file_data": "f" * size, **more}},
            st.integers(0, 80),
            st.sampled_from([{}, {"filename": "a.pdf"}]),
        ),
    ),
    max_size=4,
)


@given(
    st.lists(st.one_of(parts, st.text("ab \n", max_size=300)), min_size=1, max_size=4),
    st.integers(1, 160),
    st.integers(0, 90),
)
def test_generated_outputs_are_trimmed_the_same(
    outputs: list[Any], max_chars: int, preview: int
) -> None:
    """Both send the same messages, for texts, images and files of any size and for all limits."""
    messages: list[Message] = [{"role": "user", "content": "Look."}]
    for number, output in enumerate(outputs):
        function = {"name": f"tool_{number}", "arguments": "{}"}
        call = {"id": f"c{number}", "type": "function", "function": function}
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": f"c{number}", "content": output})
    messages += [{"role": "user", "content": "And?"}]
    settings = {"recent_turns": 1, "max_output_chars": max_chars, "preview_chars": preview}
    assert _ours(messages, settings) == _original(messages, settings)


@pytest.mark.parametrize(
    "changed",
    [
        {"recent_turns": 2},
        {"max_output_chars": 1_000},
        {"preview_chars": 21},
        {"trimmable_tools": ("get_user_details",)},
    ],
    ids=str,
)
def test_each_setting_matters(traces_dir: Path, changed: dict[str, Any]) -> None:
    """The comparison notices when a single setting differs between the two."""
    settings = SETTINGS[1]
    requests = _requests(traces_dir / "sessions_tau_bench.jsonl.gz")
    assert any(_ours(each, settings | changed) != _original(each, settings) for each in requests)


def test_reused_ids_are_named_after_the_call_they_answer(traces_dir: Path) -> None:
    """If a session uses ids again, only ours names the tool that gave the output."""
    sessions = _recorded(traces_dir / "sessions_tau_bench.jsonl.gz")
    changed = 0
    for messages in sessions:
        theirs, ours = _original(messages, SETTINGS[1]), _ours(messages, SETTINGS[1])
        named = _ours(_with_own_ids(messages), SETTINGS[1])
        assert [m["content"] for m in ours] == [m["content"] for m in named]
        changed += ours != theirs
    assert changed > 3


def test_sessions_are_really_trimmed(traces_dir: Path) -> None:
    """The settings of the comparison trim outputs of all sets of sessions."""
    for file in FILES:
        requests = _requests(traces_dir / file)
        assert any(_ours(each, SETTINGS[1]) != each for each in requests), file
