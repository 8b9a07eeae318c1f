"""The words in which engines and gateways say that a prompt is too long."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..errors import BadRequestError
from ..overflow import CODE, Overflow

_N = r"(?P<prompt>\d[\d,]*)"
_M = r"(?P<limit>\d[\d,]*)"
_A = r"(?P<answer>\d[\d,]*)"
_T = r"(?P<total>\d[\d,]*)"

WORDINGS: tuple[tuple[str, str], ...] = (
    # The replay engine.
    ("replay", rf"the prompt has {_N} tokens and {_A} more are asked for; the context holds {_M}"),
    # SGLang: tokenizer_manager.py, managers/utils.py, scheduler.py.
    ("sglang", rf"input \({_N} tokens\) is longer than the model'?s context length \({_M} tokens"),
    (
        "sglang",
        rf"maximum context length of {_M} tokens\. You requested a total of {_T} tokens: "
        rf"{_N} tokens from the input messages and {_A} tokens for the completion",
    ),
    ("sglang", rf"input length \({_N} tokens\) exceeds the maximum allowed length \({_M} tokens"),
    ("sglang", rf"prompt is too long after expanding multimodal tokens\..*=> {_N} >= {_M}"),
    ("sglang", rf"prompt exceeds the KV memory budget: input_len={_N}"),
    # vLLM: renderers/params.py, v1/engine/input_processor.py, entrypoints; 0.4 and later.
    (
        "vllm",
        rf"maximum context length is {_M} tokens\. However, you requested {_A} output tokens and "
        rf"your prompt contains (?:at least )?{_N} input tokens",
    ),
    (
        "vllm",
        rf"maximum context length is {_M} tokens\. However, your (?:prompt contains|request has) "
        rf"(?:at least )?{_N} input tokens",
    ),
    (
        "vllm",
        rf"is too large: {_A}\.? This model's maximum context length is {_M} tokens and your "
        rf"request has {_N} input tokens",
    ),
    ("vllm", rf"maximum context length is {_M} tokens\. However, your prompt contains \d+ char"),
    ("vllm", rf"prompt \(length {_N}\)[^.]*is longer than the maximum model length of {_M}"),
    ("vllm", rf"input length \({_N}\) exceeds model'?s maximum context length \({_M}\)"),
    # llama.cpp: server-context.cpp; without figures before October 2025.
    ("llama.cpp", rf"request \({_N} tokens\) exceeds the available context size \({_M} tokens\)"),
    ("llama.cpp", r"exceeds the available context size|exceed_context_size_error"),
    # OpenAI, and the servers and gateways that repeat its words.
    (
        "openai",
        rf"maximum context length is {_M} tokens[.,] however,? you requested (?:about )?{_T} "
        rf"tokens \({_N} (?:in|of)[^,;]*[,;] {_A} (?:in|for) the completion",
    ),
    (
        "openai",
        rf"maximum context length is {_M} tokens[.,] however,? (?:you requested (?:about )?|"
        rf"your messages resulted in ){_N} tokens",
    ),
    (
        "openai",
        rf"input tokens exceed the configured limit of {_M} tokens\. your messages resulted in "
        rf"{_N} tokens",
    ),
    ("openai", rf"maximum context length (?:is|of) {_M}"),
    ("openai", r"exceeds the (?:model'?s )?context window|context[_ ]length[_ ]exceeded"),
    # Anthropic.
    ("anthropic", rf"prompt is too long: {_N} tokens > {_M}"),
    ("anthropic", rf"exceed context limit: {_N} \+ {_A} > {_M}"),
    ("anthropic", r"prompt is too long"),
    # Text Generation Inference.
    (
        "tgi",
        rf"`max_new_tokens` must be <= {_M}\. given: {_N} `inputs` tokens and {_A} `max_new_tok",
    ),
    ("tgi", rf"`inputs` must have less than {_M} tokens\. given: {_N}"),
    # Ollama, LM Studio.
    (
        "ollama",
        r"prompt too long; exceeded (?:max )?context length|"
        r"input length exceeds the context length",
    ),
    ("lm studio", rf"context length of only {_M} tokens"),
    ("lm studio", r"greater than the context length"),
    # Other providers.
    ("gemini", rf"input token count \({_N}\) exceeds the maximum number of tokens allowed \({_M}"),
    ("gemini", r"input token count.{0,80}exceeds the maximum"),
    ("xai", rf"maximum prompt length is {_M} but the request contains {_N} tokens"),
    ("copilot", rf"prompt token count of {_N} exceeds the limit of {_M}"),
    ("kimi", rf"exceeded model token limit: {_M} \(requested: {_N}\)"),
    ("mistral", rf"prompt contains {_N} tokens.{{0,80}}too large for model with {_M} maximum"),
    ("cerebras", rf"current length is {_N} while limit is {_M}"),
    ("poolside", rf"input length {_N} exceeds the maximum allowed input length of {_M}"),
    ("groq", r"please reduce the length of the (?:messages|input prompt)"),
    ("bedrock", r"input is too long for requested model"),
    ("minimax", r"context window exceeds limit"),
    ("litellm", r"ContextWindowExceeded|context window exceeded"),
    ("z.ai", r"model_context_window_exceeded"),
)
"""Who writes it, and a pattern. The first that is found counts: those with figures come first."""

_PATTERNS = tuple(re.compile(pattern, re.IGNORECASE | re.DOTALL) for _, pattern in WORDINGS)
_OTHER_LIMITS = re.compile(r"rate.?limit|too many requests|per (?:minute|min|day)\b|quota", re.I)
"""Limits that shorter prompts don't help against, in words that look alike."""
_OTHER_STATUSES = frozenset({401, 402, 403, 404, 407, 408, 409, 429, 502, 503, 504})
_DIGITS = 15
_LONGEST = 4096
"""Characters of a reason that are searched."""


class PromptTooLongError(BadRequestError):
    """The engine refuses a prompt that doesn't fit into the model's context window.

    Args:
        reason: the engine's words.
        param: the field with the prompt.
    """

    code = CODE

    def __init__(self, overflow: Overflow, reason: str = "", *, param: str = "messages") -> None:
        super().__init__(overflow.message(reason), param=param)
        self.overflow = overflow


def overflow_of(
    status: int | None, reason: str, error: Mapping[str, Any] | None = None
) -> Overflow | None:
    """Return the overflow that an engine reports; None if it reports something else.

    Args:
        status: HTTP status; None if there is none.
        reason: the engine's words.
        error: the error's members; llama.cpp has the figures in them, OpenAI a code.
    """
    error = error or {}
    if status in _OTHER_STATUSES:
        return None
    text = reason[:_LONGEST]
    if error.get("code") != CODE and _OTHER_LIMITS.search(text):
        return None
    marks = (str(error.get(name)) for name in ("code", "type") if error.get(name))
    searched = " ".join((text, *marks))[: 2 * _LONGEST]
    found = next((match for each in _PATTERNS if (match := each.search(searched))), None)
    if found is None:
        return None
    return _figures({**found.groupdict(), **_members(error)})


def _figures(told: Mapping[str, str | None]) -> Overflow:
    prompt, limit, answer, total = (
        _number(told.get(name)) for name in ("prompt", "limit", "answer", "total")
    )
    if total is not None and answer is not None:
        prompt = total - answer
    if prompt is not None and limit is not None and prompt > limit:
        answer = None
    return Overflow(prompt, limit, answer or None)


def _members(error: Mapping[str, Any]) -> dict[str, str]:
    """Return llama.cpp's figures."""
    named = {"prompt": error.get("n_prompt_tokens"), "limit": error.get("n_ctx")}
    return {name: str(value) for name, value in named.items() if type(value) is int}


def _number(digits: str | None) -> int | None:
    return int(digits.replace(",", "")[:_DIGITS]) if digits else None
