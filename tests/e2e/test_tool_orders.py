"""Tools whose text changes, and tools that come in another order, on the embedded engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
from support.stack import embedded_stack

RECALL = "leyline-recall"
SYSTEM = "You look into folders. " * 20
NAMES = ("ls", "cat", "grep")
AGAIN = ("grep", "ls", "find", "cat")
"""After a reconnect: in another order, with a new tool among them."""


@pytest.fixture(scope="module")
def origin() -> Iterator[str]:
    """Proxy and embedded engine; the template's own edits are spliced."""
    options = {"pool_tokens": 65_536, "device": "cpu"}
    settings: dict[str, Any] = {"undeclared": {"template": "amortize"}, "tool_order": "first"}
    with embedded_stack(options, log_level="error", **settings) as address:
        yield address


def schema(name: str) -> dict[str, Any]:
    """A tool's parameters."""
    about = f"Where {name} looks. " * 12
    return {"type": "object", "properties": {"path": {"type": "string", "description": about}}}


def function(name: str) -> dict[str, Any]:
    """A tool of the chat API."""
    own = {"name": name, "description": f"Runs {name}.", "parameters": schema(name)}
    return {"type": "function", "function": own}


def talk(turn: int) -> list[dict[str, Any]]:
    """A conversation of so many questions."""
    said: list[dict[str, Any]] = [{"role": "user", "content": "Look."}]
    for number in range(turn):
        said += [
            {"role": "assistant", "content": f"I did, {number}."},
            {"role": "user", "content": f"Again, {number}. " * 10},
        ]
    return said


def asked(api: str, origin: str, turn: int, names: tuple[str, ...], order: str) -> dict[str, Any]:
    """The account of a turn, by the API's official client."""
    headers = {"x-leyline-session": f"tools-{api}-{order}"}
    more: dict[str, Any] = {
        "model": RECALL,
        "extra_headers": headers,
        "extra_body": {"leyline": {"tool_order": order}},
    }
    found: list[dict[str, Any] | None] = []
    # No two sessions have a beginning in common.
    system = f"By {api}, {order}. {SYSTEM}"
    if api.startswith("chat"):
        said = [{"role": "system", "content": system}, *talk(turn)]
        request: dict[str, Any] = {**more, "messages": said, "max_tokens": 2}
        request["tools"] = [*map(function, names)]
        with openai.OpenAI(base_url=f"{origin}/v1", api_key="none", max_retries=0) as sdk:
            if api == "chat":
                found = [sdk.chat.completions.create(**request).model_extra]
            else:
                events = sdk.chat.completions.create(**request, stream=True)
                found = [each.model_extra for each in events]
    elif api == "responses":
        tools = [{**function(name)["function"], "type": "function"} for name in names]
        request = {**more, "input": talk(turn), "instructions": system, "tools": tools}
        with openai.OpenAI(base_url=f"{origin}/v1", api_key="none", max_retries=0) as sdk:
            found = [sdk.responses.create(**request, max_output_tokens=2).model_extra]
    else:
        tools = [
            {"name": name, "description": f"Runs {name}.", "input_schema": schema(name)}
            for name in names
        ]
        request = {**more, "messages": talk(turn), "system": system, "max_tokens": 2}
        with anthropic.Anthropic(base_url=origin, api_key="none", max_retries=0) as theirs:
            if api == "messages":
                found = [theirs.messages.create(**request, tools=tools).model_extra]
            else:
                with theirs.messages.stream(**request, tools=tools) as stream:
                    found = [each.model_extra for each in stream if each.type == "message_delta"]
    (account,) = (each["leyline"] for each in found if each and "leyline" in each)
    return dict(account)


APIS = ("chat", "chat stream", "messages", "messages stream", "responses")


@pytest.mark.parametrize("api", APIS)
def test_a_reconnect_costs_no_prompt(origin: str, api: str) -> None:
    """Tools in another order go out in the session's first one, new tools after them: the prompt
    continues the one before. As they were sent, all of it is prefilled again, as an edit of
    tools."""
    lost = {}
    for order in ("first", "sent"):
        before = asked(api, origin, 0, NAMES, order)
        same = asked(api, origin, 1, NAMES[::-1], order)
        new = asked(api, origin, 2, AGAIN, order)
        assert before.get("tools_moved") is None
        causes = {edit["cause"] for edit in same["edits"]}
        assert causes == (set() if order == "first" else {"tools"})
        assert same.get("tools_moved") == (2 if order == "first" else None)
        assert (new.get("tools_moved") is not None) == (order == "first")
        lost[order] = same["tokens"]["prefilled"], new["tokens"]["prefilled"]
    assert lost["first"][0] < 100 < lost["sent"][0] / 3
    assert lost["first"][1] < lost["sent"][1]


def test_members_of_a_tool_in_another_order_are_other_tools(origin: str) -> None:
    """The template shows them in their order, so the change is an edit of tools, and exact, even
    where the template's own edits are spliced; a member that it doesn't show changes nothing."""
    with httpx.Client(base_url=origin, timeout=60) as http:
        tool = function("ls")
        turned = {"type": "function", "function": dict(reversed(tool["function"].items()))}
        found = []
        for turn, sent in enumerate((tool, turned, {**turned})):
            body = {
                "model": RECALL,
                "messages": [{"role": "system", "content": SYSTEM}, *talk(turn)],
                "tools": [sent],
                "max_tokens": 2,
            }
            headers = {"x-leyline-session": "turned"}
            account = http.post("/v1/chat/completions", json=body, headers=headers).json()
            found.append(account["leyline"])
        first, second, third = found
        assert first["edits"] == third["edits"] == []
        assert {(edit["cause"], edit["mode"]) for edit in second["edits"]} == {("tools", "exact")}
        assert second["outcome"] == "reprefilled"
        assert second["tokens"]["spliced"] == 0
