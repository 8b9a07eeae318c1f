"""The proxy's account of what vLLM does to chat requests, against vLLM's own code."""

from __future__ import annotations

import json
from functools import cache
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.exceptions import VLLMValidationError
from vllm.renderers.chat_utils import parse_chat_messages
from vllm.renderers.hf import _detect_content_format, safe_apply_chat_template
from vllm.renderers.params import merge_kwargs

from leyline_engine.contract import ChatDialect
from leyline_proxy.render import ChatRenderer, RenderError, dialect_of
from leyline_proxy.render.vllm_dialect import VllmDialect

Json = dict[str, Any]

CONFIG = SimpleNamespace(multimodal_config=None, enable_prompt_embeds=False)
REFUSALS = (ValueError, VLLMValidationError)
DEFAULTS = {"cohere_format": "cmd4", "enable_thinking": False}
SPECIAL = {"bos_token": "<bos>", "eos_token": "<eos>"}

HEADER = "x-anthropic-billing-header"
"""Beginning of a line that vLLM drops from the system's texts."""
ROLES = ("system", "user", "User", "assistant", "tool", "developer", "other")
TAKEN = ['{"a": [1, 2.0, null], "b": "é"}', "{}", "[]", "no", "", '{"a": "\\ud800"}']
"""Arguments of calls that vLLM takes."""

texts = st.sampled_from(["", "One.", " two\n", "Grüß 👋", f"{HEADER}: a", f"{HEADER}\nb"])
text_parts = st.fixed_dictionaries(
    {"type": st.just("text"), "text": texts},
    optional={"cache_control": st.sampled_from([None, {"type": "ephemeral"}])},
)
thinking = st.fixed_dictionaries({"type": st.just("thinking"), "thinking": texts})
parts = st.one_of(text_parts, thinking)
contents = st.one_of(st.none(), texts, texts, st.lists(parts, max_size=3))


def calls_with(arguments: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Tool calls with such arguments."""
    functions = st.fixed_dictionaries(
        {"arguments": arguments, "name": st.sampled_from(["f", "g"])}, optional={"x": st.just(1)}
    )
    return st.fixed_dictionaries(
        {"function": functions, "type": st.just("function"), "id": st.sampled_from(["c", "d"])},
        optional={"index": st.sampled_from([0, None]), "x": st.just({"y": 1})},
    )


calls = calls_with(st.sampled_from([*TAKEN, None, {"b": None}]))
schemas = st.sampled_from(
    [{}, None, {"type": "object", "properties": {"a": {"type": "varchar", "default": None}}}]
)
tools = st.fixed_dictionaries(
    {
        "type": st.just("function"),
        "function": st.fixed_dictionaries(
            {"name": st.just("f")},
            optional={
                "parameters": schemas,
                "description": st.sampled_from(["d", None]),
                "strict": st.sampled_from([True, False, None]),
                "defer_loading": st.sampled_from([True, None]),
                "x": st.just(1),
            },
        ),
    },
    optional={"defer_loading": st.sampled_from([False, None]), "x": st.just(1)},
)
messages = st.fixed_dictionaries(
    {"role": st.sampled_from(ROLES)},
    optional={
        "content": contents,
        "name": st.sampled_from(["n", None]),
        "tool_call_id": st.sampled_from(["c", None]),
        "reasoning_content": st.sampled_from(["why", "", None]),
        "reasoning": st.sampled_from(["how", None]),
        "tool_calls": st.one_of(st.none(), st.lists(calls, max_size=2)),
        "tools": st.one_of(st.none(), st.lists(tools, max_size=1)),
        "task": st.sampled_from(["t", None]),
        "refusal": st.none(),
        "prefix": st.just(True),
    },
)
turns = st.builds(
    lambda said, reply, thought, call, result: [
        {"role": "user", "content": said},
        {"role": "assistant", "content": reply} | thought | ({"tool_calls": call} if call else {}),
        *({"role": "tool", "tool_call_id": each["id"], "content": result} for each in call),
    ],
    st.one_of(texts, st.lists(text_parts, max_size=2)),
    texts,
    st.sampled_from([{}, {"reasoning_content": "why"}, {"reasoning": "how"}]),
    st.lists(calls_with(st.sampled_from(TAKEN)), max_size=2),
    texts,
)
beginnings = st.sampled_from(
    [
        [],
        [{"role": "system", "content": "Be brief."}],
        [{"role": "developer", "content": "Be brief."}],
        [{"role": "system", "content": [{"type": "text", "text": "Be"}]}],
    ]
)
bodies = st.fixed_dictionaries(
    {
        "messages": st.builds(
            lambda first, rest: [*first, *chain(*rest)],
            beginnings,
            st.lists(turns, min_size=1, max_size=4),
        )
    },
    optional={
        "tools": st.lists(tools, min_size=1, max_size=2),
        "tool_choice": st.sampled_from(["auto", "none"]),
        "reasoning_effort": st.sampled_from(["none", "low", "high", None]),
        "chat_template_kwargs": st.sampled_from(
            [None, {}, {"enable_thinking": True}, {"enable_thinking": None, "thinking": "auto"}]
        ),
    },
)


def copied(value: Any) -> Any:
    """The value as it comes from JSON."""
    return json.loads(json.dumps(value))


def in_order(value: Any) -> str:
    """The value with the order of its members."""
    return json.dumps(value)


def as_vllm(message: Json, content_format: Any) -> Any:
    """A template's view of a message; None if the request is refused."""
    try:
        request = ChatCompletionRequest.model_validate({"messages": [message]})
        (shown,), _, _ = parse_chat_messages(request.messages, CONFIG, content_format)  # type: ignore[arg-type]
    except REFUSALS:
        return None
    return shown


@pytest.mark.parametrize("takes_parts", [False, True])
@given(message=messages)
def test_a_message_is_shown_as_vllm_shows_it(takes_parts: bool, message: Json) -> None:
    """Equal in members and their order, unless vLLM refuses the request."""
    theirs = as_vllm(copied(message), "openai" if takes_parts else "string")
    try:
        ours = VllmDialect(takes_parts, developer=True).message(copied(message))
    except RenderError:
        event("left to the engine")
        return
    if theirs is None:
        event("refused by vLLM")
        return
    assert in_order(ours) == in_order(theirs)


@given(given_tools=st.lists(tools, min_size=1, max_size=3))
def test_tools_are_shown_as_vllm_shows_them(given_tools: list[Json]) -> None:
    """Equal in members and their order."""
    request = ChatCompletionRequest.model_validate({"messages": [], "tools": copied(given_tools)})
    theirs = [tool.model_dump() for tool in request.tools or []]
    ours = VllmDialect(False).asked({"tools": copied(given_tools)}).tools
    assert in_order(ours) == in_order(theirs)


@cache
def tokenizer_of(template: str) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({sign: number for number, sign in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL)
    wrapped.chat_template = template
    return wrapped


@cache
def renderer_of(template: str) -> ChatRenderer:
    """The proxy's renderer, from what the engine's document says of the template."""
    dialect = dialect_of(
        ChatDialect.VLLM,
        template,
        takes_parts=_detect_content_format(template, default="string") == "openai",
        defaults=DEFAULTS,
    )
    tokenizer = tokenizer_of(template)
    special = {**tokenizer.special_tokens_map}
    return ChatRenderer(template, special, tokenizer.backend_tokenizer.to_str(), dialect=dialect)


def prompt_of(template: str, body: Json) -> list[int] | None:
    """The prompt of a chat request by vLLM's steps (``preprocess_chat``); None if it is refused."""
    tokenizer = tokenizer_of(template)
    try:
        request = ChatCompletionRequest.model_validate(body)
        shown = [tool.model_dump() for tool in request.tools] if request.tools else None
        params = request.build_chat_params(template, "auto").with_defaults(
            merge_kwargs(DEFAULTS, {"tools": shown, "tokenize": False})
        )
        form = _detect_content_format(template, default="string")
        conversation, _, _ = parse_chat_messages(request.messages, CONFIG, form)  # type: ignore[arg-type]
        text = safe_apply_chat_template(
            CONFIG,  # type: ignore[arg-type]
            tokenizer,
            conversation,
            **params.get_apply_chat_template_kwargs(),
        )
        return tokenizer.encode(text, add_special_tokens=False)
    except (*REFUSALS, TypeError):  # the last for half a surrogate pair
        return None


TEMPLATES = (
    "GLM-4.6",
    "Kimi-K2-Instruct",
    "Qwen-Qwen2.5-7B-Instruct",
    "Qwen-Qwen3-0.6B",
    "Qwen3-Coder",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
    "deepseek-ai-DeepSeek-V3.1",
    "meta-llama-Llama-3.1-8B-Instruct",
)


@pytest.mark.parametrize("name", TEMPLATES)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=bodies)
def test_prompts_are_vllms(templates_dir: Path, name: str, body: Json) -> None:
    """Published templates give the same tokens of whole conversations, with tools and options."""
    template = (templates_dir / f"{name}.jinja").read_text(encoding="utf-8")
    theirs = prompt_of(template, copied(body))
    sent = copied(body)
    try:
        ours = renderer_of(template).render_request(sent["messages"], sent)
    except RenderError:
        event("left to the engine")
        return
    if theirs is None:
        event("refused by vLLM")
        return
    assert list(ours.tokens) == theirs


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": "x", "name": "ada"},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "assistant", "content": "x", "reasoning_content": "why"},
        {"role": "tool", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ],
)
def test_ordinary_messages_are_shown_here(message: Json) -> None:
    """Messages that agents send every day need no question to the engine."""
    shown = VllmDialect(False).message(message)
    assert shown == as_vllm(copied(message), "string")
