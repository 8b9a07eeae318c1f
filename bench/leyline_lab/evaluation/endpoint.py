"""HTTP to a running engine, for an evaluation: a request at a time, and errors that name a fix."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Self, TypeVar

import httpx
import msgspec

from leyline_engine.contract import (
    CAPABILITY_PATH,
    RECEIPT_PATH,
    RENDERER_PATH,
    Capability,
    EditPayload,
    TurnRecord,
    edit_envelope,
    judge,
    sign_envelope,
)
from leyline_lab.errors import SubjectError
from leyline_proxy.upstream.client import RendererDocument

AGAIN = "run the same command again to continue"
PAUSES_S = (0.5, 1.0, 2.0)
"""Pauses before a request whose connection failed is sent again."""
ANSWER_S = 600.0
"""Maximum seconds without a byte of an answer."""
_RECEIPT_S = 10.0
_MAX_BYTES = 256 << 20
"""Maximum size of an answer; a million log probabilities take about 40 MiB."""
_SAID = 200
"""Characters of an engine's own message that are shown."""
_T = TypeVar("_T")


class Generated(msgspec.Struct, frozen=True):
    """The answer of ``/generate``."""

    output_ids: list[int]
    meta_info: GeneratedMeta


class GeneratedMeta(msgspec.Struct, frozen=True):
    """The part of an answer's facts that an evaluation reads."""

    finish_reason: dict[str, Any]
    output_top_logprobs: list[msgspec.Raw] = []
    """For each token the likeliest ones as ``[log probability, id, text]``; undecoded."""

    def first(self) -> list[tuple[float | None, int, Any]]:
        """Return the likeliest tokens at the first position.

        Raises:
            msgspec.DecodeError: they aren't there, or of another form.
        """
        if not self.output_top_logprobs:
            raise msgspec.ValidationError("no log probabilities")
        return msgspec.json.decode(
            self.output_top_logprobs[0], type=list[tuple[float | None, int, Any]]
        )


class EngineEndpoint:
    """A running engine; must be closed at the end.

    Args:
        url: of the engine, without a path.
        api_key: bearer token that it asks for.
        hints_secret: secret with which it wants envelopes signed.

    All methods raise :class:`SubjectError` if the engine can't be reached, refuses, or answers in
    another form; the message names the fix.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        hints_secret: str | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self._secret = hints_secret
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.Client(
            base_url=self.url, headers=headers, timeout=httpx.Timeout(ANSWER_S, connect=10.0)
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def capability(self) -> Capability:
        """Return the engine's account of itself."""
        status, body = self._send("GET", CAPABILITY_PATH)
        if status == httpx.codes.SERVICE_UNAVAILABLE:
            raise SubjectError(f"{self.url} isn't ready: wait until it serves, and {AGAIN}")
        if status != httpx.codes.OK:
            self._refuse_keys(status)
            raise SubjectError(
                f"{self.url} is no engine with Leyline ({CAPABILITY_PATH} answers {status}): give "
                "the address of SGLang with the plugin or of a replay engine, not of a proxy"
            )
        capability = self._decoded(CAPABILITY_PATH, body, Capability)
        mismatch = judge(capability)
        if mismatch is not None:
            raise SubjectError(f"{self.url}: {mismatch}; to fix it, {mismatch.fix}")
        return capability

    def renderer(self) -> RendererDocument | None:
        """Return the engine's chat template and tokenizer; None if it doesn't give them."""
        status, body = self._send("GET", RENDERER_PATH)
        if status != httpx.codes.OK:
            return None
        return self._decoded(RENDERER_PATH, body, RendererDocument)

    def flush(self) -> None:
        """Empty the engine's cache."""
        status, body = self._send("POST", "/flush_cache")
        if status == httpx.codes.OK:
            return
        self._refuse_keys(status)
        raise SubjectError(
            f"{self.url} can't empty its cache (/flush_cache answers {status}{_said(body)}): "
            f"evaluate an engine that serves nobody else, and {AGAIN}"
        )

    def generate(
        self,
        prompt: Sequence[int],
        length: int,
        *,
        message_id: str,
        payload: EditPayload,
        likeliest: int = 0,
    ) -> Generated:
        """Return greedy tokens, up to the end of the message.

        Args:
            length: maximum number of tokens.
            payload: is sent in an envelope under ``message_id``; its scope is also the namespace of
                the cache that the request sees.
            likeliest: number of log probabilities for each token.
        """
        envelope = edit_envelope(message_id, payload)
        if self._secret is not None:
            envelope = sign_envelope(envelope, self._secret)
        sampling = {
            "temperature": 0,
            "max_new_tokens": length,
            "custom_params": {"kv_hints": msgspec.to_builtins(envelope)},
        }
        body: dict[str, Any] = {
            "input_ids": list(prompt),
            "sampling_params": sampling,
            "cache_salt": payload.scope,
        }
        if likeliest:
            body |= {"return_logprob": True, "top_logprobs_num": likeliest}
        status, answer = self._send("POST", "/generate", body)
        if status != httpx.codes.OK:
            self._refuse_keys(status)
            raise SubjectError(
                f"{self.url} refuses a prompt of {len(prompt)} tokens (/generate answers "
                f"{status}{_said(answer)}); {AGAIN}"
            )
        return self._decoded("/generate", answer, Generated)

    def record(self, message_id: str) -> TurnRecord:
        """Return the engine's account of a request that was answered."""
        deadline = time.monotonic() + _RECEIPT_S
        path = RECEIPT_PATH.format(message_id=message_id)
        while True:
            status, body = self._send("GET", path)
            if status == httpx.codes.OK:
                record = self._decoded("/leyline/receipts", body, TurnRecord)
                if record.finished:
                    return record
            if time.monotonic() >= deadline:
                raise SubjectError(
                    f"{self.url} has no receipt of a request that it answered: is its plugin of "
                    "this version, and is there one engine behind the address?"
                )
            time.sleep(0.02)

    def malformed(self, what: str) -> SubjectError:
        """Return the error of an answer of another form."""
        return SubjectError(
            f"{self.url} answers in another form ({what}): is it an engine of this version?"
        )

    def _refuse_keys(self, status: int) -> None:
        if status in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            raise SubjectError(f"{self.url} refuses the key (status {status}): give --api-key")

    def _decoded(self, what: str, body: bytes, kind: type[_T]) -> _T:
        try:
            return msgspec.json.decode(body, type=kind)
        # The message may quote the answer.
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise self.malformed(what) from None

    def _send(
        self, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> tuple[int, bytes]:
        """Return status and body; a connection that fails is tried again some times."""
        content = None if body is None else msgspec.json.encode(body)
        for pause in (*PAUSES_S, None):
            try:
                return self._exchange(method, path, content)
            except (httpx.NetworkError, httpx.RemoteProtocolError, httpx.ConnectTimeout) as error:
                if pause is None:
                    raise SubjectError(
                        f"{self.url} can't be reached ({type(error).__name__}): start the engine, "
                        f"and {AGAIN}"
                    ) from error
                time.sleep(pause)
            except httpx.TimeoutException as error:
                raise SubjectError(
                    f"{self.url} gave no answer within {ANSWER_S:g} s: relieve the engine, "
                    f"and {AGAIN}"
                ) from error
            except httpx.HTTPError as error:
                raise self.malformed(type(error).__name__) from error
        raise AssertionError

    def _exchange(self, method: str, path: str, content: bytes | None) -> tuple[int, bytes]:
        headers = {"content-type": "application/json"}
        with self._http.stream(method, path, content=content, headers=headers) as response:
            received = bytearray()
            for chunk in response.iter_bytes():
                received += chunk
                if len(received) > _MAX_BYTES:
                    raise self.malformed(f"more than {_MAX_BYTES >> 20} MiB")
        return response.status_code, bytes(received)


def _said(body: bytes) -> str:
    """Return an error's own message, shortened, after a colon; empty if it has none."""
    try:
        error = msgspec.json.decode(body)["error"]
        text = error["message"] if isinstance(error, dict) else error
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError, RecursionError):
        return ""
    return f": {text[:_SAID]}" if isinstance(text, str) and text else ""
