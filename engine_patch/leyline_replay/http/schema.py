"""Request bodies: the fields that are read from them, and the values that are allowed."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, TypeVar

import msgspec

from leyline_engine.contract import (
    TEXT_PARTS,
    ClaimCommand,
    ClaimError,
    LedgerQuestion,
    decode_command,
    decode_question,
)
from leyline_replay.http.errors import ApiError
from leyline_replay.text.sampling import SamplingParams

Unit = Annotated[float, msgspec.Meta(ge=0, le=1)]
Temperature = Annotated[float, msgspec.Meta(ge=0, le=2)]
Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]
Count = Annotated[int, msgspec.Meta(ge=1)]
Bias = Annotated[float, msgspec.Meta(ge=-100, le=100)]
TopLogprobs = Annotated[int, msgspec.Meta(ge=0, le=20)]

MAX_NATIVE_LOGPROBS = 1 << 20
"""Maximum number of log probabilities in an answer of ``/generate``."""

_PATH = re.compile(r" - at `\$\.?(?P<path>.*)`$")
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
_MAX_STOPS = 16


class StreamOptions(msgspec.Struct, frozen=True):
    """Options of a stream; unknown ones are ignored."""

    include_usage: bool | None = None


class CommonBody(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of both endpoints; ``null`` means the default, unknown fields are ignored."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: Count | None = None
    temperature: Temperature | None = None
    top_p: Unit | None = None
    top_k: int | None = None
    """Extra: restricts sampling to the k most likely tokens; 0 and -1 restrict nothing."""
    seed: int | None = None
    stop: str | list[str] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: dict[str, Bias] | None = None
    ignore_eos: bool | None = None
    """Extra: generate to the limit, past the model's end token."""
    custom_params: Any = None
    """Extra: ``kv_hints`` in here is the Leyline envelope."""

    @property
    def stops(self) -> tuple[str, ...]:
        stop = self.stop or []
        return (stop,) if isinstance(stop, str) else tuple(stop)

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def sampling(self, vocab_size: int, top_logprobs: int | None) -> SamplingParams:
        """Return the sampling parameters.

        Raises:
            ApiError: a biased token doesn't exist.
        """
        return SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(0, self.top_k or 0),
            seed=self.seed,
            frequency_penalty=self.frequency_penalty or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            logit_bias=_token_bias(self.logit_bias or {}, vocab_size),
            top_logprobs=top_logprobs,
        )


class ChatBody(CommonBody, frozen=True, kw_only=True):
    """``POST /v1/chat/completions``."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    response_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Extra: variables for the chat template."""
    continue_final_message: bool | None = None
    """Extra: the last message is the assistant's, and the answer goes on with it."""
    add_generation_prompt: bool | None = None
    """Extra: must be false with ``continue_final_message``, and begins an answer by default."""

    @property
    def template_options(self) -> dict[str, Any]:
        """Variables for the chat template, and the end of the prompt."""
        return _template_options(self)

    @property
    def parses_tools(self) -> bool:
        """True if tool-call blocks in the answer are calls of the caller's tools."""
        return bool(self.tools) and self.tool_choice != "none"


class CompletionBody(CommonBody, frozen=True, kw_only=True):
    """``POST /v1/completions``."""

    prompt: str | list[Any]
    logprobs: TopLogprobs | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None


class NativeSampling(msgspec.Struct, frozen=True, kw_only=True):
    """``sampling_params`` of ``POST /generate``; unknown fields are ignored."""

    temperature: Temperature = 1.0
    max_new_tokens: Count = 128
    ignore_eos: bool = False
    custom_params: Any = None
    """``kv_hints`` in here is the Leyline envelope."""


class NativeBody(msgspec.Struct, frozen=True, kw_only=True):
    """``POST /generate``, SGLang's own form; unknown fields are ignored."""

    input_ids: list[int]
    sampling_params: NativeSampling = NativeSampling()
    stream: bool = False
    top_logprobs_num: Annotated[int, msgspec.Meta(ge=0, le=MAX_NATIVE_LOGPROBS)] = 0

    @property
    def common(self) -> CommonBody:
        """The same as a body of the other routes."""
        asked = self.sampling_params
        return CommonBody(
            temperature=asked.temperature,
            ignore_eos=asked.ignore_eos,
            custom_params=asked.custom_params,
        )


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """``POST /tokenize``."""

    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    prompt: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None

    @property
    def template_options(self) -> dict[str, Any]:
        """Variables for the chat template, and the end of the prompt."""
        return _template_options(self)


def _template_options(body: ChatBody | TokenizeBody) -> dict[str, Any]:
    ends = {
        name: value
        for name in ("continue_final_message", "add_generation_prompt")
        if (value := getattr(body, name)) is not None
    }
    return {**(body.chat_template_kwargs or {}), **ends}


B = TypeVar("B", ChatBody, CompletionBody, NativeBody, TokenizeBody)
D = TypeVar("D")


def decode_body(raw: bytes, kind: type[B]) -> B:
    """Decode a request body.

    Raises:
        ApiError: it isn't JSON, or a field has the wrong type or range.
    """
    body: B = _decoded(partial(msgspec.json.decode, type=kind), raw)
    return body


def decode_claim_command(raw: bytes) -> ClaimCommand:
    """Decode a command about claims.

    Raises:
        ApiError: it isn't JSON or not a command, or a field has the wrong type or value.
    """
    return _decoded(decode_command, raw)


def decode_ledger_question(raw: bytes) -> LedgerQuestion:
    """Decode a question about the ledger. Raises as :func:`decode_claim_command`."""
    return _decoded(decode_question, raw)


def _decoded(decode: Callable[[bytes], D], raw: bytes) -> D:
    try:
        return decode(raw)
    except msgspec.ValidationError as error:
        text = str(error)
        found = _PATH.search(text)
        param = found["path"] if found else None
        if isinstance(error.__cause__, ClaimError):
            param = f"claim.{error.__cause__.field}"
        if param is None and (missing := re.search(r"missing required field `(\w+)`", text)):
            param = missing[1]
        raise ApiError(400, text, param=param, code="invalid_type") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, "the request body isn't valid JSON", code="invalid_json") from error


def check_common(body: CommonBody, model: str) -> None:
    """Refuse values that this engine doesn't serve.

    Raises:
        ApiError: names the field.
    """
    if body.model is not None and body.model != model:
        raise ApiError(
            404,
            f"the model {body.model!r} isn't served here; this engine serves {model!r}",
            param="model",
            code="model_not_found",
        )
    if body.n not in (None, 1):
        raise unsupported("n", "this engine gives one answer per request; send n=1")
    if body.top_k is not None and body.top_k < -1:
        raise ApiError(400, "top_k must be -1, 0 or positive", param="top_k")
    if len(body.stops) > _MAX_STOPS:
        raise ApiError(400, f"at most {_MAX_STOPS} stop strings are allowed", param="stop")


def check_chat(body: ChatBody) -> None:
    """Refuse messages and options that would otherwise be dropped silently.

    Raises:
        ApiError: names the field.
    """
    check_messages(body.messages)
    if body.response_format is not None and body.response_format.get("type") != "text":
        raise unsupported("response_format", "this engine answers in plain text only")
    forced = body.tool_choice not in (None, "none", "auto")
    if forced:
        raise unsupported("tool_choice", "this engine can't force a tool call; use 'auto'")
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs=true", param="top_logprobs")


def check_native(body: NativeBody) -> None:
    """Refuse options that this engine doesn't serve.

    Raises:
        ApiError: names the field.
    """
    if body.stream:
        raise unsupported("stream", "this engine streams /v1/completions only")
    if body.top_logprobs_num * body.sampling_params.max_new_tokens > MAX_NATIVE_LOGPROBS:
        raise ApiError(
            400,
            f"an answer has at most {MAX_NATIVE_LOGPROBS:,} log probabilities: lower "
            "top_logprobs_num or max_new_tokens",
            param="top_logprobs_num",
        )


def check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    """Refuse roles and contents that no text template can render.

    Raises:
        ApiError: names the field.
    """
    if not messages:
        raise ApiError(400, "messages is empty; send at least one", param="messages")
    for index, message in enumerate(messages):
        _check_message(message, f"messages[{index}]")


def check_completion(body: CompletionBody) -> None:
    """Refuse options that this engine doesn't serve.

    Raises:
        ApiError: names the field.
    """
    if body.echo:
        raise unsupported("echo", "this engine doesn't echo prompts; leave echo out")
    if body.suffix:
        raise unsupported("suffix", "this engine doesn't fill in the middle")
    if body.best_of not in (None, 1):
        raise unsupported("best_of", "this engine gives one answer per request; send best_of=1")


def unsupported(param: str, message: str) -> ApiError:
    """Return a 400 for a field that is valid OpenAI and isn't served here."""
    return ApiError(400, message, param=param, code="unsupported_parameter")


def _check_message(message: Mapping[str, Any], where: str) -> None:
    role = message.get("role")
    if role not in _ROLES:
        raise ApiError(
            400, f"{where}.role must be one of {', '.join(sorted(_ROLES))}", param=f"{where}.role"
        )
    match message.get("content"):
        case None | str():
            return
        case list() as parts:
            for index, part in enumerate(parts):
                _check_part(part, f"{where}.content[{index}]")
        case _:
            raise ApiError(
                400,
                f"{where}.content must be a string, a list of parts or null",
                param=f"{where}.content",
            )


def _check_part(part: object, where: str) -> None:
    match part:
        case {"type": str(kind), **rest}:
            key = TEXT_PARTS.get(kind)
            if key is None:
                raise ApiError(
                    400,
                    f"{where}.type: this engine reads text parts only",
                    param=f"{where}.type",
                    code="unsupported_content",
                )
            if not isinstance(rest.get(key), str):
                raise ApiError(400, f"{where}.{key} must be a string", param=f"{where}.{key}")
        case _:
            raise ApiError(400, f"{where} must be an object with a type", param=where)


def _token_bias(raw: Mapping[str, float], vocab_size: int) -> dict[int, float]:
    bias: dict[int, float] = {}
    for key, value in raw.items():
        token = int(key) if key.isascii() and key.isdigit() and len(key) < 10 else -1
        if not 0 <= token < vocab_size:
            raise ApiError(
                400, f"logit_bias keys are token ids below {vocab_size}", param="logit_bias"
            )
        bias[token] = value
    return bias
