"""Tools in the order in which their session had them first."""

from __future__ import annotations

import json
from typing import Any

import pytest

from leyline_proxy.request.parse import ChatRequest, parse_chat
from leyline_proxy.request.tool_order import in_first_order, native_in_first_order, tools_after
from leyline_proxy.settings import Settings
from leyline_proxy.tenants.tenant import build_tenant

TENANT = build_tenant("red", Settings(tool_order="first"))
FUNCTION = b'{"type":"function", "function" : {"name":"%b","x":1.0e2}}'
LEGACY = b'{ "name" :"%b"}'


def request(names: str, item: bytes = FUNCTION, member: str = "tools", more: str = "") -> Any:
    """A chat request with tools of one letter."""
    tools = b",  ".join(item % bytes([ord(name)]) for name in names)
    head = b'{"model":"m", "messages":[{"role":"user","content":"Hi"}],"%b" :[%b]%b}'
    return parse_chat(head % (member.encode(), tools, more.encode()), {}, TENANT)


def names_in(chat: ChatRequest, member: str = "tools") -> str:
    """The letters of a request's tools, as its bytes and its body have them alike."""
    raw = json.loads(chat.raw)[member]
    assert raw == chat.body[member]
    return "".join((each.get("function") or each)["name"] for each in raw)


@pytest.mark.parametrize(("item", "member"), [(FUNCTION, "tools"), (LEGACY, "functions")])
@pytest.mark.parametrize(
    ("turns", "sent"),
    [
        (["abc", "cab"], "abc"),
        (["abc", "cdab", "dbca"], "abcd"),
        (["abc", "ca", "cab"], "abc"),
        (["ab", "xy", "yxba"], "abxy"),
        (["aab", "baa"], "aab"),
        (["abc", "abc"], "abc"),
    ],
)
def test_new_tools_come_after_those_that_the_session_had(
    item: bytes, member: str, turns: list[str], sent: str
) -> None:
    """A tool keeps its place for good, also if it was gone meanwhile; each keeps its bytes."""
    known: tuple[int, ...] = ()
    for names in turns:
        asked = request(names, item, member)
        chat = in_first_order(asked, known)
        known = tools_after(known, chat)
    assert names_in(chat, member) == sent
    assert (chat.moved_tools > 0) is (turns[-1] != sent)
    for name in set(sent):
        assert item % name.encode() in chat.raw
    assert (chat is asked) is (turns[-1] == sent)


def test_a_request_may_insist_on_its_order() -> None:
    """``leyline.tool_order: sent`` leaves the order, and teaches the session none."""
    known = tools_after((), request("abc"))
    own = request("cab", more=',"leyline":{"tool_order":"sent"}')
    assert in_first_order(own, known) is own
    assert tools_after((), own) == ()


def test_tools_of_other_apis_take_the_same_order() -> None:
    """Anthropic's and the Responses API's own lists are ordered by the same names; what has no name
    there, such as a hosted search, stays behind."""
    known = tools_after((), request("abc"))
    raw = b'{"tools":[{"type":"web_search"},{"name":"c", "input_schema":{}},{"name":"a"}]}'
    ordered = b'{"tools":[{"name":"a"},{"name":"c", "input_schema":{}},{"type":"web_search"}]}'
    assert native_in_first_order(raw, json.loads(raw), known) == ordered


def test_what_is_no_tool_is_left_to_the_engine() -> None:
    """Lists of other things, and other things than lists, pass unchanged."""
    known = tools_after((), request("abc"))
    for more in (',"functions":7', ',"functions":[1,null]', ',"functions":{"a":1}'):
        chat = in_first_order(request("cab", more=more), known)
        assert names_in(chat) == "abc"
        assert chat.body["functions"] == json.loads("{" + more[1:] + "}")["functions"]
