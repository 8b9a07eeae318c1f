"""Proof that the proxy renders prompts exactly as the engine does.

A renderer that is off by one token would make every splice a mismatch, so it is compared with
the engine's own tokens before it is used. What can't be proven is not used.
"""

from __future__ import annotations

from typing import Any

import anyio.to_thread
import structlog

from ..core.rendered import Rendered
from ..render import ChatRenderer
from .client import UpstreamClient

log = structlog.get_logger("leyline.handshake")

_TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "read_file",
            "description": "Read a file.",
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string"}, "lines": {"type": "integer"}},
                "required": ["path"],
            },
        },
    }
]
_PLAIN: list[dict[str, Any]] = [
    {"role": "user", "content": "Grüß dich! \u4f60\u597d 👋\n\n\tWhat does `a  b` mean?"},
    {"role": "assistant", "content": "Two  spaces.\n"},
    {"role": "user", "content": 'Thanks. <b>And</b> "this" & that?'},
]
_AGENT: list[dict[str, Any]] = [
    {"role": "system", "content": "You are a careful agent."},
    {"role": "user", "content": "Read a.py, please."},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "read_file", "arguments": '{"path": "a.py", "lines": 3}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "def f(x):\n    return x + 1\n"},
    {"role": "assistant", "content": "It adds one."},
    {"role": "user", "content": [{"type": "text", "text": "And b.py?"}]},
]
_PARTS: list[dict[str, Any]] = [
    {"role": "system", "content": [{"type": "text", "text": "You are a careful agent."}]},
    {
        "role": "user",
        "content": [{"type": "text", "text": "Read b.py,"}, {"type": "text", "text": "please."}],
    },
    {
        "role": "assistant",
        "tool_calls": [
            {
                "id": "call_2",
                "type": "function",
                "function": {"name": "read_file", "arguments": '{"path":"b\\u00fc.py" ,"lines":3}'},
            }
        ],
    },
    {
        "role": "tool",
        "tool_call_id": "call_2",
        "content": [{"type": "text", "text": "y = 'no'\n"}, {"type": "text", "text": "z = 2"}],
    },
    {"role": "user", "content": "And what is z?"},
]
"""What :mod:`leyline_engine.contract.chat` normalises: no content, compact arguments, parts."""
PROBES: tuple[tuple[list[dict[str, Any]], list[dict[str, Any]] | None], ...] = (
    (_PLAIN, None),
    (_AGENT[:2], None),
    (_AGENT, _TOOLS),
    (_PARTS, _TOOLS),
)


class RendererUnproven(Exception):  # noqa: N818 - a finding, no failure of ours
    """The renderer may not be used; the message says why."""


async def proven_renderer(client: UpstreamClient, model: str) -> ChatRenderer:
    """A renderer from the engine's documents, equal to the engine on every probe it accepts.

    Raises:
        RendererUnproven: no documents, unusable ones, or a probe that differs.
        leyline_proxy.errors.ProxyError: the engine can't be reached.
    """
    document = await client.renderer()
    if document is None:
        raise RendererUnproven("the engine gives no chat template and tokenizer")
    try:
        renderer = await anyio.to_thread.run_sync(
            ChatRenderer, document.chat_template, document.special_tokens, document.tokenizer_json
        )
    except Exception as error:
        log.warning("renderer_unusable", error=type(error).__name__)
        raise RendererUnproven("the engine's chat template or tokenizer can't be loaded") from error
    equal = 0
    for number, (messages, tools) in enumerate(PROBES):
        body = {"model": model, "messages": messages, **({"tools": tools} if tools else {})}
        theirs = await client.tokenize(body)
        ours = _render(renderer, messages, tools)
        if theirs is None and ours is None:
            continue  # a template may refuse a role or tools; then both must
        if theirs is None or ours is None or list(ours.tokens) != theirs:
            raise RendererUnproven(f"probe conversation {number} renders differently in the engine")
        equal += 1
    if not equal:
        raise RendererUnproven("the engine renders none of the probe conversations")
    return renderer


def _render(
    renderer: ChatRenderer, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None
) -> Rendered | None:
    try:
        return renderer.render(messages, tools)
    except Exception:  # a template raises what it likes; the engine's verdict is compared
        return None
