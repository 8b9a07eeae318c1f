"""Words of engines and gateways for a prompt that is too long, and clients' patterns, as data."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

_MAX = "This model's maximum context length is 4096 tokens"


def _error(message: str, kind: str = "BadRequestError", **members: Any) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": None, "code": 400, **members}}


@dataclass(frozen=True)
class Words:
    """One engine's refusal, and the figures in it: prompt, window, and room for the answer."""

    who: str
    body: dict[str, Any]
    prompt: int | None = None
    limit: int | None = None
    answer: int | None = None
    status: int = 400

    @property
    def raw(self) -> bytes:
        """The body as bytes."""
        return json.dumps(self.body).encode()


ENGINES: tuple[Words, ...] = (
    Words(
        "replay",
        _error(
            "the prompt has 10 tokens and 5000 more are asked for; the context holds 4096",
            code="context_length_exceeded",
        ),
        10,
        4096,
        5000,
    ),
    Words(
        "sglang",
        _error("The input (5000 tokens) is longer than the model's context length (4096 tokens)."),
        5000,
        4096,
    ),
    Words(
        "sglang total",
        {
            "object": "error",
            "message": "Requested token count exceeds the model's maximum context length of 4096 "
            "tokens. You requested a total of 4196 tokens: 4000 tokens from the input messages and "
            "196 tokens for the completion. Please reduce the number of tokens in the input "
            "messages or the completion to fit within the limit.",
            "type": "BadRequestError",
            "code": 400,
        },
        4000,
        4096,
        196,
    ),
    Words(
        "sglang scheduler",
        _error("Input length (5000 tokens) exceeds the maximum allowed length (4090 tokens). Use "),
        5000,
        4090,
    ),
    Words(
        "sglang pictures",
        _error(
            "Multimodal prompt is too long after expanding multimodal tokens. After expanding "
            "len(req.origin_input_ids_unpadded)=70 => 5000 >= 4096."
        ),
        5000,
        4096,
    ),
    Words(
        "sglang memory", _error("Request prompt exceeds the KV memory budget: input_len=500."), 500
    ),
    Words(
        "vllm",
        _error(
            f"{_MAX}. However, your prompt contains at least 4097 input tokens, which exceeds this "
            "limit even without any output tokens. Please reduce the length of the input prompt."
        ),
        4097,
        4096,
    ),
    Words(
        "vllm characters",
        _error(
            f"{_MAX}. However, your prompt contains 99999 characters (more than 65536 characters, "
            "which is the upper bound for 4096 input tokens). Please reduce the length of the "
            "input prompt."
        ),
        None,
        4096,
    ),
    Words(
        "vllm 0.8",
        _error(
            f"{_MAX}. However, you requested 100 output tokens and your prompt contains at least "
            "3997 input tokens, for a total of at least 4097 tokens."
        ),
        3997,
        4096,
        100,
    ),
    Words(
        "vllm 0.10",
        _error(
            "'max_tokens' or 'max_completion_tokens' is too large: 4000. This model's maximum "
            "context length is 4096 tokens and your request has 200 input tokens (4000 > 4096 - "
            "200)."
        ),
        200,
        4096,
        4000,
    ),
    Words(
        "vllm decoder",
        _error("The decoder prompt (length 5000) is longer than the maximum model length of 4096."),
        5000,
        4096,
    ),
    Words(
        "vllm full",
        _error(
            "The decoder prompt (length 4096) plus the number of requested output tokens (at least "
            "1) is longer than the maximum model length of 4096."
        ),
        4096,
        4096,
    ),
    Words(
        "vllm input",
        _error("Input length (5000) exceeds model's maximum context length (4096)."),
        5000,
        4096,
    ),
    Words(
        "llama.cpp",
        _error(
            "request (5000 tokens) exceeds the available context size (4096 tokens), try "
            "increasing it",
            "exceed_context_size_error",
        ),
        5000,
        4096,
    ),
    Words(
        "llama.cpp members",
        _error("too much", "exceed_context_size_error", n_prompt_tokens=5000, n_ctx=4096),
        5000,
        4096,
    ),
    Words(
        "llama.cpp 2024",
        _error("the request exceeds the available context size. try increasing it", "server_error"),
        status=500,
    ),
    Words(
        "openai",
        _error(
            f"{_MAX}. However, your messages resulted in 5000 tokens. Please reduce the length of "
            "the messages.",
            "invalid_request_error",
            code="context_length_exceeded",
        ),
        5000,
        4096,
    ),
    Words(
        "openai completion",
        _error(
            f"{_MAX}. However, you requested 4196 tokens (4000 in the messages, 196 in the "
            "completion). Please reduce the length of the messages or completion."
        ),
        4000,
        4096,
        196,
    ),
    Words(
        "openai legacy",
        _error(
            f"{_MAX}, however you requested 4196 tokens (4000 in your prompt; 196 for the "
            "completion). Please reduce your prompt; or completion length."
        ),
        4000,
        4096,
        196,
    ),
    Words(
        "openai configured",
        _error(
            "Input tokens exceed the configured limit of 272,000 tokens. Your messages resulted in "
            "509,178 tokens. Please reduce the length of the messages."
        ),
        509_178,
        272_000,
    ),
    Words(
        "openai responses",
        _error("Your input exceeds the context window of this model. Please adjust your input."),
    ),
    Words("code alone", _error("No.", code="context_length_exceeded")),
    Words(
        "openrouter",
        _error(
            "This endpoint's maximum context length is 4096 tokens. However, you requested about "
            "5000 tokens (4900 of text input, 100 of tool input). Please reduce the length."
        ),
        5000,
        4096,
    ),
    Words(
        "anthropic",
        {
            "type": "error",
            "error": {
                "type": "invalid_request_error",
                "message": "prompt is too long: 213462 tokens > 200000 maximum",
            },
        },
        213_462,
        200_000,
    ),
    Words(
        "anthropic together",
        _error(
            "input length and `max_tokens` exceed context limit: 188240 + 21333 > 200000, decrease "
            "input length or `max_tokens` and try again"
        ),
        188_240,
        200_000,
        21_333,
    ),
    Words(
        "tgi",
        {
            "error": "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 4096. "
            "Given: 4000 `inputs` tokens and 196 `max_new_tokens`",
            "error_type": "validation",
        },
        4000,
        4096,
        196,
        422,
    ),
    Words(
        "tgi inputs",
        {
            "error": "Input validation error: `inputs` must have less than 4096 tokens. "
            "Given: 5000",
            "error_type": "validation",
        },
        5000,
        4096,
        None,
        422,
    ),
    Words("ollama", {"error": "prompt too long; exceeded max context length by 904 tokens"}),
    Words(
        "lm studio",
        {
            "error": "Trying to keep the first 5000 tokens when context the overflows. However, "
            "the model is loaded with context length of only 4096 tokens, which is not enough."
        },
        None,
        4096,
    ),
    Words(
        "gemini",
        _error(
            "The input token count (1196265) exceeds the maximum number of tokens allowed "
            "(1048575)."
        ),
        1_196_265,
        1_048_575,
    ),
    Words(
        "xai",
        _error(
            "This model's maximum prompt length is 131072 but the request contains 537812 tokens."
        ),
        537_812,
        131_072,
    ),
    Words("copilot", _error("prompt token count of 5000 exceeds the limit of 4096"), 5000, 4096),
    Words(
        "kimi",
        _error("Invalid request: Your request exceeded model token limit: 4096 (requested: 5000)"),
        5000,
        4096,
    ),
    Words(
        "mistral",
        _error(
            "Prompt contains 5000 tokens and 0 draft tokens, too large for model with 4096 maximum "
            "context length"
        ),
        5000,
        4096,
    ),
    Words(
        "cerebras",
        _error(
            "Please reduce the length of the messages or completion. Current length is 5000 while "
            "limit is 4096"
        ),
        5000,
        4096,
    ),
    Words("bedrock", {"message": "Input is too long for requested model."}),
    Words("litellm", _error("litellm.ContextWindowExceededError: BadRequestError: no")),
    Words(
        "a gateway around llama.cpp",
        {
            "detail": json.dumps(
                _error("request (5000 tokens) exceeds the available context size (4096 tokens)")
            )
        },
        5000,
        4096,
    ),
    Words(
        "fastapi",
        {"detail": f"{_MAX}. However, your messages resulted in 5000 tokens."},
        5000,
        4096,
    ),
)

OTHERS: tuple[Words, ...] = (
    Words("rate", _error("Too many tokens per minute; maximum context length is 9 tokens")),
    Words("rate 429", _error(f"{_MAX}."), status=429),
    Words("busy", _error(f"{_MAX}."), status=503),
    Words("credentials", _error(f"{_MAX}."), status=401),
    Words("field", _error("temperature must be between 0 and 2")),
    Words("output", _error("max_tokens must be at least 1, got 0.")),
    Words("body", {"detail": "Request Entity Too Large"}, status=413),
)
"""Refusals that a shorter prompt doesn't help against, or not surely."""


@dataclass(frozen=True)
class Client:
    """A client's test for the overflow: of the status, the error's code and its text."""

    name: str
    recognises: Callable[[int, str | None, str], bool]


def _any(*patterns: str) -> Callable[[str], bool]:
    compiled = [re.compile(pattern, re.IGNORECASE) for pattern in patterns]
    return lambda text: any(each.search(text) for each in compiled)


_PI = _any(
    r"prompt is too long",
    r"exceeds the context window",
    r"reduce the length of the messages",
    r"maximum context length is \d+ tokens",
    r"exceeds the available context size",
    r"context[_ ]length[_ ]exceeded",
)
_ROO = _any(
    r"\bcontext\s*(?:length|window)\b",
    r"\btoken\s*limit\b",
    r"maximum\s*(?:context\s*)?(?:length|tokens)",
    r"prompt\s*is\s*too\s*long",
    r"input\s*is\s*too\s*long",
)
_LITELLM = _any(
    r"exceed context limit",
    r"this model's maximum context length is",
    r"is longer than the model's context length",
    r"exceeds the available context size",
)
_CREWAI = _any(r"maximum context length", r"context[_ ]length[_ ]exceeded", r"input is too long")

OPENAI_CLIENTS: Sequence[Client] = (
    # earendil-works/pi, packages/ai/src/utils/overflow.ts; opencode and its forks took it over.
    Client("pi, opencode", lambda status, code, text: _PI(text)),
    # cline/cline, context-error-handling.ts
    Client(
        "cline",
        lambda status, code, text: (
            code == "context_length_exceeded"
            or (status == 400 and re.search(r"context\s*(length|window)", text) is not None)
        ),
    ),
    Client("cline by text", lambda status, code, text: status == 400 and "context length" in text),
    # RooCodeInc/Roo-Code, context-error-handling.ts
    Client("roo", lambda status, code, text: status == 400 and _ROO(text)),
    # BerriAI/litellm, exception_mapping_utils.py
    Client("litellm", lambda status, code, text: _LITELLM(text)),
    # crewAIInc/crewAI, context_window_exceeding_exception.py
    Client("crewai", lambda status, code, text: _CREWAI(f"{code} {text}")),
    # openai/codex: the code of a failed response.
    Client("codex", lambda status, code, text: code == "context_length_exceeded"),
)
"""Clients of OpenAI's APIs. The patterns are the ones for such APIs."""

ANTHROPIC_CLIENTS: Sequence[Client] = (
    Client("claude code", lambda status, code, text: text.lower().startswith("prompt is too long")),
    Client("pi, opencode", lambda status, code, text: _PI(text)),
    # RooCodeInc/Roo-Code: by the type and one of these.
    Client(
        "roo",
        lambda status, code, text: (
            code == "invalid_request_error"
            and _any(r"prompt is too long", r"exceeds.*context", r"token.*limit")(text)
        ),
    ),
    Client("cline", lambda status, code, text: code == "invalid_request_error"),
)
"""Clients of Anthropic's API. Their ``code`` is the error's type."""
