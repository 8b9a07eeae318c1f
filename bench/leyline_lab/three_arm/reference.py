"""The intended answer of an arm, by the replay engine: another engine, in fp32 on transformers.

For ``off`` and ``radix`` it is that of the prefilled prompt; for ``splice`` and ``naive`` the
contract of ``amortize``: the same edits spliced by the replay engine, which tests compare with the
contract computed in full.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec

from leyline_engine.contract import RECEIPT_PATH, EditPayload, TurnRecord, edit_envelope
from leyline_proxy.upstream.embedded import create_embedded_engine

from ..errors import ServerAnswerError
from .clients import TOP, ServerAnswer, StepLogprobs
from .workload import (
    BUILD_TOKENS,
    Cut,
    Retained,
    Session,
    SessionName,
    edit_turn,
    replay_turn,
)


@dataclass(frozen=True, slots=True)
class Steps:
    """The generated tokens' texts, and the likeliest tokens at each position."""

    chosen: tuple[str, ...]
    top: tuple[StepLogprobs, ...]


def logit_delta(answer: Steps | ServerAnswer, reference: Steps) -> float | None:
    """Return the largest difference of log probabilities to a reference.

    It covers the tokens that are among the likeliest of both, at the first generated position and
    at each later one while both chose the same tokens.

    Returns:
        None if they have no token in common.
    """
    worst: float | None = None
    for step, (mine, theirs) in enumerate(zip(answer.top, reference.top, strict=False)):
        if answer.chosen[:step] != reference.chosen[:step]:
            break
        # Tokens of broken bytes share one text.
        for text in mine.keys() & theirs.keys() - {"\ufffd"}:
            worst = max(worst or 0.0, abs(mine[text] - theirs[text]))
    return worst


class Reference:
    """The replay engine with a model, in this process.

    Args:
        model: in the replay engine's form.
        pool_tokens: KV slots; a session takes about three times its prompt.
        page_tokens: tokens per page, as the measured server has them.

    Raises:
        EngineUnavailable: it can't be created here.
    """

    def __init__(self, model: Path | str, pool_tokens: int, page_tokens: int = 1) -> None:
        options = {
            "model": str(model),
            "dtype": "float32",
            "pool_tokens": pool_tokens,
            "page_tokens": page_tokens,
        }
        self._page_tokens = page_tokens
        self._http = httpx.AsyncClient(
            transport=httpx.ASGITransport(app=create_embedded_engine("replay", options)),
            base_url="http://engine",
            timeout=900,
        )

    async def amortised(
        self, session: Session, name: SessionName, max_new_tokens: int, boundary: int
    ) -> Steps:
        """Return the steps of the replayed prompt, spliced as in the splice arm.

        Raises:
            ServerAnswerError: it wasn't spliced, for example if the same prompt was prefilled
                before.
        """
        # As many tokens as the server writes: with larger pages, they fill a turn's last one.
        last = await self._retain(session.builds[-1], name.registered("build"), BUILD_TOKENS)
        payload = edit_turn(session, name, last, boundary).payload
        edited = await self._retain(session.edited, payload, max_new_tokens)
        turn = replay_turn(session, name, last, edited, boundary, cut=Cut(self._page_tokens))
        steps = await self._complete(session.replayed, max_new_tokens, turn.payload)
        receipt = (await self._record(turn.payload)).receipt
        if receipt.tokens.prefilled != turn.must.total:
            raise ServerAnswerError(f"the replay engine did not splice: {receipt.detail}")
        return steps

    async def exact(self, session: Session, max_new_tokens: int) -> Steps:
        """Return the steps of the replayed prompt, prefilled."""
        return await self._complete(session.replayed, max_new_tokens)

    async def _retain(self, prompt: Sequence[int], payload: EditPayload, tokens: int) -> Retained:
        await self._complete(prompt, tokens, payload)
        record = await self._record(payload)
        return Retained(payload.turn, (*prompt, *record.output_ids), record.receipt.lineage)

    async def _record(self, payload: EditPayload) -> TurnRecord:
        path = RECEIPT_PATH.format(message_id=_message_id(payload))
        response = await self._http.get(path)
        return msgspec.json.decode(response.raise_for_status().content, type=TurnRecord)

    async def _complete(
        self, prompt: Sequence[int], max_new_tokens: int, payload: EditPayload | None = None
    ) -> Steps:
        body: dict[str, Any] = {
            "prompt": list(prompt),
            "max_tokens": max_new_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": TOP,
        }
        if payload is not None:
            envelope = edit_envelope(_message_id(payload), payload)
            body["custom_params"] = {"kv_hints": msgspec.to_builtins(envelope)}
        response = await self._http.post("/v1/completions", json=body)
        if response.status_code != httpx.codes.OK:
            raise ServerAnswerError(f"the replay engine answers {response.text[:300]}")
        found: Mapping[str, Any] = response.json()["choices"][0]["logprobs"]
        return Steps(tuple(found["tokens"]), tuple(found["top_logprobs"]))


def _message_id(payload: EditPayload) -> str:
    return f"{payload.session}.{payload.turn}"
