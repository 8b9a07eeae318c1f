"""The envelope on an SGLang request: packed, bounded, read, and gone afterwards."""

from __future__ import annotations

import json
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from weakref import proxy

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from sglang.srt.managers.io_struct import GenerateReqInput, TokenizedGenerateReqInput
from sglang.srt.managers.kv_hints import decode_kv_hints_envelope
from sglang.srt.sampling.sampling_params import SamplingParams

from leyline_engine.admit.packed_hints import MAX_ENVELOPE_BYTES
from leyline_engine.contract import (
    Action,
    Directive,
    EditPayload,
    Envelope,
    LineageRun,
    Reason,
    SourceRef,
    SpanLabel,
    edit_envelope,
    sign_envelope,
)
from leyline_engine.sglang.hints import beside_tokens, pack_hints, take_hints

SECRET = "between proxy and engine"
PAYLOAD = EditPayload(session="s", scope="t", turn="t1")
ENVELOPE = edit_envelope("m-1", PAYLOAD)


@dataclass
class SchedulerRequest:
    """The two members of a ``Req`` that matter here; a ``Req`` itself needs a running engine."""

    sampling_params: SamplingParams
    kv_hints: Any = None


def json_of(envelope: Envelope) -> dict[str, Any]:
    return json.loads(msgspec.json.encode(envelope))


def received(custom_params: Any, kv_hints: Any = None) -> SchedulerRequest:
    """A request as the scheduler sees it, after the tokenizer process has packed it."""
    sent = GenerateReqInput(
        text="x", sampling_params={"custom_params": custom_params}, kv_hints=kv_hints
    )
    sent.normalize_batch_and_arguments()
    pack_hints(sent)
    return SchedulerRequest(SamplingParams(**sent.sampling_params), sent.kv_hints)


def test_an_envelope_in_custom_params_arrives() -> None:
    """The payload that the proxy sent is the one that the scheduler reads."""
    hints = take_hints(received({"kv_hints": json_of(ENVELOPE)}), None)
    assert (hints.message_id, hints.payload, hints.invalid) == ("m-1", PAYLOAD, None)


def test_a_native_envelope_arrives() -> None:
    """SGLang's own ``kv_hints`` member is read where there is no secret."""
    hints = take_hints(received(None, json_of(ENVELOPE)), None)
    assert (hints.message_id, hints.payload, hints.invalid) == ("m-1", PAYLOAD, None)


def test_an_envelope_is_read_without_the_tokenizer_process() -> None:
    """The scheduler also takes what nothing has packed before."""
    params = SamplingParams(custom_params={"kv_hints": json_of(ENVELOPE)})
    assert take_hints(SchedulerRequest(params), None).payload == PAYLOAD


def test_a_signature_survives_the_way() -> None:
    """A signed envelope is accepted; one with another signature, or none, is refused by name."""
    signed = sign_envelope(ENVELOPE, SECRET)
    assert take_hints(received({"kv_hints": json_of(signed)}), SECRET).payload == PAYLOAD
    for bad in (ENVELOPE, sign_envelope(ENVELOPE, "another secret")):
        hints = take_hints(received({"kv_hints": json_of(bad)}), SECRET)
        assert (hints.message_id, hints.payload) == ("m-1", None)
        assert hints.invalid is Reason.INVALID_EDIT
        assert "signature" in hints.detail


def test_a_native_envelope_is_refused_where_signatures_are_wanted() -> None:
    """SGLang drops the signature of a native envelope, so that it can't be trusted."""
    signed = json_of(sign_envelope(ENVELOPE, SECRET))
    assert not hasattr(decode_kv_hints_envelope(signed), "signature")
    hints = take_hints(received(None, signed), SECRET)
    assert (hints.message_id, hints.payload) == ("m-1", None)
    assert hints.invalid is Reason.INVALID_EDIT
    assert "custom_params" in hints.detail


def test_a_native_envelope_of_others_is_let_be() -> None:
    """If signatures are wanted, an envelope without one of our actions isn't ours to refuse."""
    foreign = Envelope("0.1", "m-2", (Action("a", "hicache.prefetch", "1.0"),))
    request = received(None, json_of(foreign))
    assert take_hints(request, SECRET).invalid is None
    assert request.kv_hints is not None


def test_unknown_actions_are_skipped_and_reported() -> None:
    """An action of another type or version is named in the result."""
    envelope = Envelope("0.1", "m-3", (Action("a", "leyline.edit", "9.0"), *ENVELOPE.actions))
    hints = take_hints(received({"kv_hints": json_of(envelope)}), None)
    assert hints.payload == PAYLOAD
    assert [action.action_version for action in hints.skipped] == ["9.0"]


def test_several_answers_are_no_turn() -> None:
    """With ``n`` above 1 nothing is retained, and edits are refused by name; the rest holds."""
    labels = (SpanLabel("m1", 0, 4),)
    plain = replace(PAYLOAD, spans=labels, forget=("m0",), lineage=(LineageRun(3, "l"),))
    edited = replace(plain, directives=(Directive(1, 2),), sources=(SourceRef("t0", 4, "d"),))
    for payload, reason in ((plain, None), (edited, Reason.UNSUPPORTED_RUNTIME)):
        request = received({"kv_hints": json_of(edit_envelope("m-1", payload))})
        request.sampling_params.n = 2
        hints = take_hints(request, None)
        assert (hints.message_id, hints.payload) == ("m-1", replace(payload, turn=""))
        assert hints.invalid is reason


@pytest.mark.parametrize(
    ("member", "named"),
    [
        ("mm_inputs", "images, audio or video"),
        ("input_embeds", "embeddings in place of tokens"),
        ("positional_embed_overrides", "embeddings for some positions"),
        ("token_type_ids", "token types"),
        ("multi_item_delimiter_indices", "shared tokens between items"),
        ("token_indices_to_pool", "slots of its own"),
    ],
)
def test_a_prompt_with_more_than_tokens_is_no_turn(member: str, named: str) -> None:
    """An image in the prompt, for one: nothing is retained, edits and reuse are refused by name."""
    members = dict.fromkeys(TokenizedGenerateReqInput.__struct_fields__)
    assert beside_tokens(SimpleNamespace(**members)) == ""
    beside = beside_tokens(SimpleNamespace(**members | {member: [1]}))
    assert beside == named
    edited = replace(
        PAYLOAD,
        forget=("m0",),
        directives=(Directive(1, 2),),
        sources=(SourceRef("t0", 4, "d"),),
    )
    for payload, reason in ((PAYLOAD, None), (edited, Reason.UNSUPPORTED_RUNTIME)):
        request = received({"kv_hints": json_of(edit_envelope("m-1", payload))})
        hints = take_hints(request, None, beside=beside)
        assert (hints.payload, hints.reuse) == (replace(payload, turn=""), None)
        assert hints.invalid is reason
        assert reason is None or named in hints.detail


@pytest.mark.parametrize("native", [False, True])
def test_an_oversized_envelope_is_dropped_early(native: bool) -> None:
    """An envelope above the limit never reaches the scheduler; its refusal does."""
    payload = msgspec.structs.replace(PAYLOAD, share="x" * MAX_ENVELOPE_BYTES)
    raw = json_of(edit_envelope("m-4", payload))
    request = received(None, raw) if native else received({"kv_hints": raw})
    assert len(msgspec.json.encode((request.sampling_params, request.kv_hints))) < 2000
    hints = take_hints(request, None)
    assert (hints.message_id, hints.payload) == ("m-4", None)
    assert hints.invalid is Reason.INVALID_EDIT
    assert str(MAX_ENVELOPE_BYTES) in hints.detail


def test_an_envelope_travels_as_one_string() -> None:
    """Nested ``custom_params`` would break SGLang's msgpack transport, so they aren't nested."""
    params = received({"kv_hints": json_of(ENVELOPE)}).sampling_params
    wire = msgspec.msgpack.encode(params)
    assert msgspec.msgpack.decode(wire, type=SamplingParams).custom_params == params.custom_params
    nested = SamplingParams(custom_params={"kv_hints": json_of(ENVELOPE)})
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(nested), type=SamplingParams)


def test_nothing_is_left_for_logit_processors() -> None:
    """Only the caller's other parameters remain, in a copy; without any, there are none at all."""
    request = received({"kv_hints": json_of(ENVELOPE), "thinking_budget": 5})
    before = request.sampling_params
    take_hints(request, None)
    assert request.sampling_params.custom_params == {"thinking_budget": 5}
    assert set(before.custom_params) == {"kv_hints", "thinking_budget"}

    request = received({"kv_hints": json_of(ENVELOPE)})
    request.sampling_params.custom_params["__req__"] = proxy(request)
    take_hints(request, None)
    assert request.sampling_params.custom_params is None


@pytest.mark.parametrize("custom", [None, {}, {"thinking_budget": 5}, {"kv_hints": None}])
def test_a_request_without_an_envelope_is_left_alone(custom: dict[str, Any] | None) -> None:
    """Nothing is read, and what the caller sent beside stays."""
    request = received(custom)
    hints = take_hints(request, SECRET)
    assert (hints.message_id, hints.payload, hints.invalid) == (None, None, None)
    rest = {key: value for key, value in (custom or {}).items() if key != "kv_hints"}
    assert (request.sampling_params.custom_params or {}) == rest


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda children: st.lists(children) | st.dictionaries(st.text(st.characters()), children),
    max_leaves=20,
)
ALMOST = st.fixed_dictionaries(
    {
        "protocol_version": JSON,
        "message_id": st.text() | JSON,
        "actions": JSON,
        "signature": JSON,
        "refused": JSON,
    }
)


@given(raw=JSON | ALMOST, secret=st.none() | st.just(SECRET))
def test_no_envelope_fails_a_request(raw: Any, secret: str | None) -> None:
    """Any content in the envelope's place is read without raising, and names a reason."""
    request = SchedulerRequest(SamplingParams(custom_params={"kv_hints": raw}))
    hints = take_hints(request, secret)
    assert request.sampling_params.custom_params is None
    assert raw is None or hints.invalid is not None or hints.message_id is not None
    packed = received({"kv_hints": raw})
    assert take_hints(packed, secret) == hints
