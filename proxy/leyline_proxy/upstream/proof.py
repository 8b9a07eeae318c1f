"""Proof that the proxy renders prompts exactly as the engine does.

A renderer that is off by one token would make every splice a mismatch, so it is compared with the
engine's own tokens before use. An unproven renderer isn't used: the proxy then asks the engine for
the tokens of each prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import anyio.to_thread
import msgspec
import structlog

from leyline_engine.contract import TOKENIZE_PATH

from ..model.rendered import Rendered
from ..model.template_roles import TemplateRoles, roles_shown
from ..render import ChatRenderer, dialect_of
from ..render.renderer import TEXT_MEMORY_BYTES
from .client import RendererDocument, UpstreamClient
from .tokens import tokenize

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
"""Cases that engines normalise: no content, compact arguments, parts."""
_THINKING: list[dict[str, Any]] = [
    {"role": "system", "content": "Think first."},
    {"role": "user", "content": "Two and two?", "name": "ada"},
    {
        "role": "assistant",
        "reasoning_content": "2 + 2",
        "content": "<think>\n2+2\n</think>\n\nFour.",
    },
    {"role": "user", "content": "And three?"},
    {"role": "assistant", "content": "", "tool_calls": []},
    {"role": "user", "content": [{"type": "text", "text": " Well? "}]},
]
_CALLS: list[dict[str, Any]] = [
    {"role": "user", "content": "Read c.py and d.py."},
    {
        "role": "assistant",
        "content": "Both.",
        "tool_calls": [
            {
                "id": f"call_{name}",
                "index": index,
                "type": "function",
                "function": {"arguments": f'{{"path": "{name}.py"}}', "name": "read_file"},
            }
            for index, name in enumerate("cd")
        ],
    },
    {"role": "tool", "tool_call_id": "call_c", "name": "read_file", "content": ""},
    {"role": "tool", "tool_call_id": "call_d", "content": [{"type": "text", "text": "d"}]},
    {
        "role": "assistant",
        "content": [{"type": "text", "text": "One"}, {"type": "text", "text": "."}],
    },
]
"""Ends with the assistant, which some engines turn into the user."""


@dataclass(frozen=True, slots=True)
class Probe:
    """A chat request whose tokens are compared."""

    messages: list[dict[str, Any]]
    members: Mapping[str, Any]
    """The body's other members."""

    @property
    def body(self) -> dict[str, Any]:
        return {**self.members, "messages": self.messages}


_BARE_TOOLS: list[dict[str, Any]] = [
    {
        "function": {"strict": False, "parameters": {}, "name": "stop", "x-note": 1},
        "type": "function",
    },
    {"type": "function", "function": {"name": "go"}},
]
PROBES = (
    Probe(_PLAIN, {}),
    Probe(_AGENT[:2], {}),
    Probe(_AGENT, {"tools": _TOOLS}),
    Probe(_PARTS, {"tools": _TOOLS}),
    Probe(_PARTS, {"tools": _BARE_TOOLS}),
    Probe(_THINKING, {}),
    Probe(_THINKING[:5], {"chat_template_kwargs": {"enable_thinking": False, "thinking": False}}),
    Probe(_CALLS, {"tools": _TOOLS, "tool_choice": "none"}),
)
"""Cases that engines treat differently: parts, calls, missing contents, thinking, tools, the last
message."""


@dataclass(frozen=True, slots=True)
class Rendering:
    """The source of prompts' tokens."""

    renderer: ChatRenderer | None = None
    proven: bool = False
    """True if the renderer equals the engine's; otherwise it only locates contents in the engine's
    tokens."""
    problem: str = "not asked yet"
    """The reason that it isn't proven; empty if it is."""
    fingerprint: str = ""
    """Digest of the engine's chat template and tokenizer; empty if they aren't known."""
    tokens_path: str = TOKENIZE_PATH
    """Path of the engine's own tokens."""
    roles: TemplateRoles = field(default_factory=TemplateRoles)
    """Roles that the chat template shows; all if it isn't known."""

    @property
    def source(self) -> str:
        """``local``, ``engine`` (one more request per turn) or ``none``."""
        if self.renderer is None:
            return "none"
        return "local" if self.proven else "engine"


async def examine_rendering(
    client: UpstreamClient, model: str, *, memory_bytes: int = TEXT_MEMORY_BYTES
) -> Rendering:
    """Return a renderer equal to the engine's on every probe that it accepts, or else the engine's
    own tokens as the source.

    Args:
        memory_bytes: memory for texts that were rendered and tokenised before.

    Raises:
        leyline_proxy.errors.ProxyError: the engine can't be reached.
    """
    document = await client.renderer()
    if document is None:
        return Rendering(problem="the engine gives no chat template and tokenizer")
    try:
        renderer, fingerprint = await anyio.to_thread.run_sync(_load, document, memory_bytes)
    except Exception as error:
        log.warning("renderer_unusable", error=type(error).__name__)
        return Rendering(problem="the engine's chat template or tokenizer can't be loaded")
    equal, problem = 0, ""
    answered = False
    for number, probe in enumerate(PROBES):
        theirs = await tokenize(client, {"model": model, **probe.body}, document.tokens_path)
        ours = await anyio.to_thread.run_sync(_render, renderer, probe)
        answered = answered or theirs is not None
        if ours is None:
            continue  # refused here: the engine gives the tokens of such a request
        if theirs is None or list(ours.tokens) != theirs:
            problem = f"probe conversation {number} renders differently in the engine"
            break
        equal += 1
    if not equal and not problem:
        problem = "none of the probe conversations can be rendered and compared"
    if not answered:
        return Rendering(problem=problem)
    return Rendering(
        renderer,
        proven=not problem,
        problem=problem,
        fingerprint=fingerprint,
        tokens_path=document.tokens_path,
        roles=await anyio.to_thread.run_sync(_roles, renderer),
    )


def _roles(renderer: ChatRenderer) -> TemplateRoles:
    return roles_shown(lambda messages: renderer.text(messages, None))


def _load(document: RendererDocument, memory_bytes: int) -> tuple[ChatRenderer, str]:
    """Return the renderer, and the digest of the document."""
    dialect = dialect_of(
        document.dialect,
        document.chat_template,
        takes_parts=document.takes_parts,
        defaults=document.template_kwargs,
        withholds_tools=document.withholds_tools,
    )
    renderer = ChatRenderer(
        document.chat_template,
        document.special_tokens,
        document.tokenizer_json,
        dialect=dialect,
        max_remembered_bytes=memory_bytes,
    )
    encoded = msgspec.json.encode(document, order="deterministic")
    return renderer, sha256(encoded).hexdigest()


def _render(renderer: ChatRenderer, probe: Probe) -> Rendered | None:
    try:
        return renderer.render_request(probe.messages, probe.members)
    except Exception:  # a template may raise anything
        return None
