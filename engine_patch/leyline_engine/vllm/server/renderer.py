"""vLLM's chat rendering: its description, so that a proxy can repeat it, and its tokens.

vLLM's own ``/tokenize`` leaves thinking and options of a chat request out.
"""

from __future__ import annotations

import json
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from leyline_engine.contract import TOKENS_PATH, ChatDialect
from leyline_engine.server.endpoints import NoRendererError, special_tokens_of


def renderer_document(state: Any) -> dict[str, Any]:
    """Return the chat renderer's parts and arguments.

    Args:
        state: the state of vLLM's application, once it has begun to serve.

    Raises:
        NoRendererError: vLLM renders with code of its own, or has no fast tokenizer.
    """
    from vllm.renderers.hf import (
        HfRenderer,
        resolve_chat_template,
        resolve_chat_template_content_format,
    )

    online, config = state.online_renderer, state.online_renderer.model_config
    if online.use_harmony or type(online.renderer) is not HfRenderer:
        raise NoRendererError("this engine renders chats without a Jinja template")
    tokenizer = online.renderer.tokenizer
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise NoRendererError("this engine has no fast tokenizer to show")
    some: tuple[Any, ...] = (None, [{}])
    plain, with_tools = (
        resolve_chat_template(tokenizer, online.chat_template, tools, model_config=config)
        for tools in some
    )
    if plain is None or plain != with_tools:
        raise NoRendererError("this engine has no chat template, or another one for tools")
    return {
        "chat_template": plain,
        "special_tokens": special_tokens_of(tokenizer),
        "tokenizer_json": backend.to_str(),
        "dialect": ChatDialect.VLLM,
        "takes_parts": resolve_chat_template_content_format(
            online.chat_template,
            None,
            online.chat_template_content_format,
            tokenizer,
            model_config=config,
        )
        == "openai",
        "template_kwargs": dict(online.default_chat_template_kwargs),
        "withholds_tools": bool(online.exclude_tools_when_tool_choice_none),
        "tokens_path": TOKENS_PATH,
    }


async def answer_with_tokens(state: Any, request: Request) -> Response:
    """Answer a chat request with its prompt's tokens, whether or not its tools may be called.

    vLLM's own errors give the answer to what it refuses.

    Args:
        state: see :func:`renderer_document`.
    """
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    online = state.online_renderer
    chat = ChatCompletionRequest.model_validate(json.loads(await request.body()))
    refused = online.validate_chat_template(
        chat.chat_template, chat.chat_template_kwargs, online.trust_request_chat_template
    )
    if refused is not None:
        return JSONResponse(refused.model_dump(), refused.error.code)
    withheld = chat.tool_choice == "none" and online.exclude_tools_when_tool_choice_none
    tools = None if withheld or not chat.tools else [tool.model_dump() for tool in chat.tools]
    _, (prompt,) = await online.preprocess_chat(
        chat,
        chat.messages,
        default_template=online.chat_template,
        default_template_content_format=online.chat_template_content_format,
        default_template_kwargs=online.default_chat_template_kwargs,
        tool_dicts=tools,
        skip_mm_cache=True,
    )
    return JSONResponse({"tokens": list(prompt["prompt_token_ids"])})
