"""Requests with envelopes to a real SGLang server, and what the server says of itself."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import count
from typing import Any, Self

import httpx
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from leyline_engine.contract import (
    RECEIPT_PATH,
    EditPayload,
    SourceRef,
    TurnRecord,
    edit_envelope,
    token_array,
    token_digest,
)

RECEIPT_WAIT_S = 20.0
IDLE_WAIT_S = 60.0
_UNSEEN = count(1)


def request_body(
    prompt: Sequence[int], envelope: object = None, *, decode: int = 8, **body: Any
) -> dict[str, Any]:
    """A greedy ``/generate`` body.

    Args:
        prompt: token ids.
        envelope: JSON-shaped, or what msgspec makes JSON of; None for a plain request.
        decode: tokens to generate, past any end-of-sequence token.
        body: further members of the body.
    """
    sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": decode, "ignore_eos": True}
    if envelope is not None:
        sampling["custom_params"] = {"kv_hints": msgspec.to_builtins(envelope)}
    return {"input_ids": list(prompt), "sampling_params": sampling} | body


def new_message_id() -> str:
    """A name that no request of this process has had."""
    return f"message-{next(_UNSEEN)}-{time.monotonic_ns()}"


def source_of(turn: str, tokens: Sequence[int]) -> SourceRef:
    """A payload's reference to a finished turn: prompt and answer."""
    return SourceRef(turn, len(tokens), token_digest(token_array(tokens)))


class EngineClient:
    """One connection pool to one server."""

    def __init__(self, base_url: str) -> None:
        self.http = httpx.Client(base_url=base_url, timeout=120)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()

    def plain(self, prompt: Sequence[int], **options: Any) -> list[int]:
        """The answer to a request without an envelope."""
        return self.post(request_body(prompt, **options))["output_ids"]

    def post(self, body: dict[str, Any]) -> dict[str, Any]:
        """One answer of ``/generate``."""
        answer: dict[str, Any] = self.http.post("/generate", json=body).raise_for_status().json()
        return answer

    def turn(
        self, prompt: Sequence[int], payload: EditPayload, **options: Any
    ) -> tuple[list[int], TurnRecord]:
        """Answer and finished record of a request with a payload."""
        name = new_message_id()
        return self.with_envelope(prompt, edit_envelope(name, payload), name, **options)

    def with_envelope(
        self, prompt: Sequence[int], envelope: object, name: str, **options: Any
    ) -> tuple[list[int], TurnRecord]:
        """The same for any envelope."""
        tokens = self.post(request_body(prompt, envelope, **options))["output_ids"]
        return tokens, self.record(name)

    def record(self, name: str) -> TurnRecord:
        """The finished record of a message; it may lag a moment after the answer."""
        deadline = time.monotonic() + RECEIPT_WAIT_S
        while True:
            answer = self.http.get(RECEIPT_PATH.format(message_id=name))
            if answer.status_code == httpx.codes.OK:
                record = msgspec.json.decode(answer.content, type=TurnRecord)
                if record.finished:
                    return record
            assert time.monotonic() < deadline, f"no finished record: {answer.text[:500]}"
            time.sleep(0.02)

    def load(self) -> tuple[int, int]:
        """Requests that run or wait, and tokens that are locked, over all schedulers."""
        loads = self.http.get("/v1/loads").raise_for_status().json()["loads"]
        requests = sum(each["num_running_reqs"] + each["num_waiting_reqs"] for each in loads)
        return requests, sum(each["num_used_tokens"] for each in loads)

    def metric(self, name: str) -> float:
        """The sum of a Prometheus series over its labels; 0 where it has no sample yet."""
        text = self.http.get("/metrics").raise_for_status().text
        families = text_string_to_metric_families(text)
        return sum(s.value for family in families for s in family.samples if s.name == name)

    def wait_idle(self) -> None:
        """Wait until nothing runs or waits.

        Raises:
            AssertionError: when a request is stuck, or KV is held by none.
        """
        deadline = time.monotonic() + IDLE_WAIT_S
        while (load := self.load()) != (0, 0):
            assert time.monotonic() < deadline, f"requests and tokens held: {load}"
            time.sleep(0.05)
