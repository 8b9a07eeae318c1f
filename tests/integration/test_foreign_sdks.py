"""Sessions that change their model: the official SDKs send the history of the model before."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from support.stack import embedded_stack

RECALL = "leyline-recall"
PAGE = "".join(f"{number:04d} drwxr-xr-x build/module_{number}\n" for number in range(30))
CITED = [{"type": "web_search_result", "url": "u", "title": "t", "encrypted_content": "E"}]
FETCHED = {
    "type": "web_fetch_result",
    "url": "u",
    "content": {
        "type": "document",
        "source": {"type": "text", "media_type": "text/plain", "data": PAGE},
    },
}
BLOCKS = [
    {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "q"}},
    {"type": "web_search_tool_result", "tool_use_id": "s", "content": CITED},
    {"type": "web_fetch_tool_result", "tool_use_id": "s", "content": FETCHED},
    {"type": "mcp_tool_use", "id": "m", "name": "n", "server_name": "s", "input": {}},
    {"type": "mcp_tool_result", "tool_use_id": "m", "content": "r", "is_error": False},
]
ITEMS = [
    {"type": "web_search_call", "id": "w", "status": "completed", "action": {"type": "search"}},
    {"type": "image_generation_call", "id": "i", "status": "completed", "result": "AA=="},
    {
        "type": "code_interpreter_call",
        "id": "c",
        "container_id": "c",
        "status": "completed",
        "code": "ls",
        "outputs": [{"type": "logs", "logs": PAGE}],
    },
    {"type": "shell_call", "id": "h", "call_id": "h", "action": {"commands": ["ls"]}},
    {
        "type": "shell_call_output",
        "call_id": "h",
        "output": [{"stdout": PAGE, "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}],
    },
    {"type": "compaction", "id": "k", "encrypted_content": "gAAAA"},
]
EDIT = {"chars": [40, 300], "replacement": "", "mode": "amortize"}


@pytest.fixture(scope="module")
def origin() -> Iterator[str]:
    """Proxy and embedded engine."""
    options = {"pool_tokens": 32_768, "device": "cpu"}
    with embedded_stack(options, log_level="error") as address:
        yield address


def user(text: str) -> dict[str, Any]:
    """A message of the user."""
    return {"role": "user", "content": text}


@pytest.mark.parametrize("stream", [False, True])
def test_a_session_from_anthropics_servers_goes_on_and_splices(origin: str, stream: bool) -> None:
    """Each turn is answered, and an edit of a page that their server fetched is spliced."""
    talk: list[Any] = [
        user(f"Go, {stream}."),
        {"role": "assistant", "content": BLOCKS},
        user("And?"),
    ]
    with anthropic.Anthropic(base_url=origin, api_key="none", max_retries=0) as sdk:

        def turn(**leyline: Any) -> Any:
            asked: dict[str, Any] = {"model": RECALL, "max_tokens": 4, "messages": talk}
            asked["extra_body"] = {"leyline": leyline}
            if not stream:
                return sdk.messages.create(**asked)
            with sdk.messages.stream(**asked) as events:
                last = [event for event in events if event.type == "message_delta"][-1]
                extra = last.model_extra or {}
                return events.get_final_message().model_copy(update={"leyline": extra["leyline"]})

        first = turn()
        said = [each.model_dump(include={"type", "text"}) for each in first.content]
        talk += [{"role": "assistant", "content": said}, user("Go on.")]
        second = turn(edits=[{"message": 1, **EDIT}])
    assert second.leyline["outcome"] == "spliced"
    assert second.leyline["session"] == first.leyline["session"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_session_from_openais_servers_goes_on_and_splices(origin: str, stream: bool) -> None:
    """So is one of the Responses API, also when it is continued from what is stored."""
    with openai.OpenAI(base_url=f"{origin}/v1", api_key="none", max_retries=0) as sdk:

        def turn(items: list[Any], previous: str | None, **leyline: Any) -> Any:
            asked: dict[str, Any] = {"model": RECALL, "max_output_tokens": 4, "input": items}
            asked |= {"previous_response_id": previous, "extra_body": {"leyline": leyline}}
            if not stream:
                return sdk.responses.create(**asked)
            found = list(sdk.responses.create(**asked, stream=True))
            return found[-1].response

        first = turn([user(f"Go, {stream}."), *ITEMS, user("And?")], None)
        second = turn([user("Go on.")], first.id, edits=[{"message": 2, **EDIT}])
    assert second.leyline["outcome"] == "spliced"
    assert second.leyline["session"] == first.leyline["session"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_session_with_results_alone_splices(origin: str, stream: bool) -> None:
    """Results whose call is gone, and one that is null, are planned as they render."""
    talk: list[Any] = [
        user(f"Go, {stream}."),
        {"role": "tool", "tool_call_id": "gone", "content": PAGE},
        {"role": "tool", "tool_call_id": "gone", "content": None},
        user("And?"),
    ]
    with openai.OpenAI(base_url=f"{origin}/v1", api_key="none", max_retries=0) as sdk:

        def turn(**leyline: Any) -> Any:
            asked: dict[str, Any] = {"model": RECALL, "max_tokens": 4, "messages": talk}
            asked["extra_body"] = {"leyline": leyline}
            if not stream:
                return sdk.chat.completions.create(**asked)
            chunks = list(sdk.chat.completions.create(**asked, stream=True))
            return next(each for each in chunks if (each.model_extra or {}).get("leyline"))

        turn()
        talk += [{"role": "assistant", "content": "Yes."}, user("Go on.")]
        assert turn(edits=[{"message": 1, **EDIT}]).leyline["outcome"] == "spliced"
