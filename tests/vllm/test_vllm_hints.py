"""The envelope on a vLLM request: carried by its parameters, read in the scheduler, gone then."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.utils.request_logger import RequestLogger
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.v1.kv_hints import KvHintsEnvelope
from vllm.v1.request import Request
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from leyline_engine.admit.packed_hints import MAX_ENVELOPE_BYTES
from leyline_engine.contract import (
    Directive,
    EditPayload,
    Reason,
    SourceRef,
    edit_envelope,
    sign_envelope,
)
from leyline_engine.vllm.hints import take_hints
from leyline_engine.vllm.server.carrying import carry_envelopes

SECRET = "between proxy and engine"
PAYLOAD = EditPayload(session="s", scope="t", turn="t1")
EDIT = EditPayload(
    session="s",
    scope="t",
    turn="t1",
    directives=(Directive(1, 2),),
    sources=(SourceRef("t0", 4, "d"),),
)


def json_of(payload: EditPayload = PAYLOAD, secret: str | None = None) -> dict[str, Any]:
    envelope = edit_envelope("m-1", payload)
    signed = envelope if secret is None else sign_envelope(envelope, secret)
    return json.loads(msgspec.json.encode(signed))


@pytest.fixture(autouse=True)
def carrying(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """vLLM's records with the hooks of a serving process."""
    for owner, name in (
        (ChatCompletionRequest, "to_sampling_params"),
        (CompletionRequest, "to_sampling_params"),
        (RequestLogger, "log_inputs"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    carry_envelopes()
    yield


def params_of(chat: bool = True, **members: Any) -> SamplingParams:
    """A request's parameters, as they reach the engine core."""
    if chat:
        body: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
        request: Any = ChatCompletionRequest.model_validate(body | members)
    else:
        request = CompletionRequest.model_validate({"prompt": "x"} | members)
    sent = MsgpackEncoder().encode(request.to_sampling_params(16, {}))
    received: SamplingParams = MsgpackDecoder(SamplingParams).decode(sent)
    return received


def received(params: Any, **members: Any) -> Request:
    """A request in the scheduler."""
    pooling = params if isinstance(params, PoolingParams) else None
    return Request("r", [1, 2, 3], None if pooling else params, pooling, **members)


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("way", ["custom_params", "kv_transfer_params"])
def test_an_envelope_arrives_and_is_gone(chat: bool, way: str) -> None:
    """The scheduler reads what the proxy sent; workers get the client's own arguments alone."""
    params = params_of(chat, **{way: {"kv_hints": json_of(), "z": 1}}, vllm_xargs={"a": 2})
    request = received(params)
    hints = take_hints(request, None)
    assert (hints.message_id, hints.payload, hints.invalid) == ("m-1", PAYLOAD, None)
    kept = {"a": 2} | ({"kv_transfer_params": {"z": 1}} if way == "kv_transfer_params" else {})
    assert request.sampling_params is not None
    assert request.sampling_params.extra_args == kept
    assert take_hints(request, None).payload is None


def test_a_request_without_an_envelope_is_untouched() -> None:
    """Its parameters are the same object, and it has no hints."""
    request = received(params := params_of(vllm_xargs={"a": 2}))
    hints = take_hints(request, SECRET)
    assert (hints.message_id, hints.payload, hints.invalid) == (None, None, None)
    assert request.sampling_params is params


def test_a_client_brings_no_envelope_by_another_way() -> None:
    """Extra arguments of the packed envelope's name are dropped."""
    packed = json.dumps(json_of())
    assert params_of(vllm_xargs={"leyline": packed, "leyline_unspliced": ""}).extra_args is None


@pytest.mark.parametrize(
    ("raw", "detail"),
    [
        ({"message_id": "m-1", "x": "x" * MAX_ENVELOPE_BYTES}, str(MAX_ENVELOPE_BYTES)),
        ({"message_id": "m-1"}, "kv_hints"),
        ("{", "kv_hints"),
        (5, "kv_hints"),
    ],
    ids=["too large", "incomplete", "no JSON", "a number"],
)
def test_a_bad_envelope_says_why(raw: Any, detail: str) -> None:
    """It never fails its request, and is small on its way."""
    params = params_of(custom_params={"kv_hints": raw})
    assert len(json.dumps(params.extra_args)) < 1000
    hints = take_hints(received(params), None)
    assert hints.invalid is Reason.INVALID_EDIT
    assert detail in hints.detail


def test_only_signed_envelopes_are_taken_where_there_is_a_secret() -> None:
    """Unsigned ones are refused, and so are native ones, which can't be signed."""
    signed = params_of(custom_params={"kv_hints": json_of(secret=SECRET)})
    assert take_hints(received(signed), SECRET).payload == PAYLOAD
    bare = params_of(custom_params={"kv_hints": json_of()})
    assert take_hints(received(bare), SECRET).invalid is not None
    native = msgspec.convert(json_of(), KvHintsEnvelope)
    hints = take_hints(received(SamplingParams(), kv_hints=native), SECRET)
    assert (hints.message_id, hints.payload) == ("m-1", None)
    assert "native" in hints.detail


def test_a_native_envelope_is_read_where_there_is_no_secret() -> None:
    """Requests made in Python bring vLLM's own record."""
    native = msgspec.convert(json_of(), KvHintsEnvelope)
    assert take_hints(received(SamplingParams(), kv_hints=native), None).payload == PAYLOAD


@pytest.mark.parametrize(
    ("sent", "members", "word"),
    [
        ({"n": 2}, {}, "one answer"),
        ({"prompt_logprobs": 1}, {}, "computed again"),
        ({"echo": True}, {}, "computed again"),
        ({}, {"prompt_is_token_ids": [True, False, True]}, "embeddings"),
        ({}, {"resumable": True}, "more to come"),
        ({"prompt": ["a", "b"]}, {}, "one prompt"),
    ],
)
def test_some_prompts_are_never_spliced(
    sent: dict[str, Any], members: dict[str, Any], word: str
) -> None:
    """The edit is refused in words, and the turn is no source; its session stays known."""
    custom = {"kv_hints": json_of(EDIT)}
    hints = take_hints(
        received(params_of("prompt" not in sent, custom_params=custom, **sent), **members), None
    )
    assert hints.payload is not None
    assert (hints.payload.session, hints.payload.turn, hints.reuse) == ("s", "", None)
    assert hints.invalid is Reason.UNSUPPORTED_RUNTIME
    assert word in hints.detail


def test_a_pooling_request_is_never_spliced() -> None:
    """It generates nothing, so it is no turn."""
    native = msgspec.convert(json_of(EDIT), KvHintsEnvelope)
    hints = take_hints(received(PoolingParams(), kv_hints=native), None)
    assert hints.invalid is Reason.UNSUPPORTED_RUNTIME


def test_the_log_of_requests_shows_no_envelope(caplog: pytest.LogCaptureFixture) -> None:
    """vLLM prints parameters at ``--enable-log-requests``; the engine's are untouched by that."""
    params = params_of(custom_params={"kv_hints": json_of()}, vllm_xargs={"mine": 2})
    shown: list[Any] = []
    logger = RequestLogger(max_log_len=None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "vllm.entrypoints.serve.utils.request_logger.logger.info",
            lambda *parts: shown.extend(parts),
        )
        logger.log_inputs("r", None, None, None, params=params, lora_request=None)
    text = " ".join(map(str, shown))
    assert "mine" in text and "m-1" not in text
    assert params.extra_args is not None and len(params.extra_args) == 3
