"""Questions about a scheduler's ledger, as they reach it, and over HTTP."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
from scheduler_kit import Scheduler

from leyline_engine.contract import (
    LEDGER_PATH,
    SIGNATURE_HEADER,
    LedgerAnswer,
    LedgerQuestion,
    sign_bytes,
)
from leyline_engine.server.claim_clock import ClaimAnswer, ClaimMessage
from leyline_engine.sglang import plugin
from leyline_engine.sglang.server.http import CLAIMS_METHOD


def post_question(
    base_url: str, *spans: str, scope: str = "t", session: str = "s", secret: str | None = None
) -> LedgerAnswer:
    """Ask a server."""
    body = msgspec.json.encode(LedgerQuestion(scope=scope, session=session, spans=spans))
    headers = {} if secret is None else {SIGNATURE_HEADER: sign_bytes(body, secret)}
    answer = httpx.post(f"{base_url}{LEDGER_PATH}", content=body, headers=headers, timeout=60)
    return msgspec.json.decode(answer.raise_for_status().content, type=LedgerAnswer)


def control(scheduler: Scheduler, question: str) -> Any:
    """Give a scheduler a question as SGLang's process of HTTP sends it; the whole output."""
    sent: list[Any] = []
    scheduler.ipc_channels = SimpleNamespace(  # type: ignore[attr-defined]
        send_to_tokenizer=SimpleNamespace(send_output=lambda output, _: sent.append(output))
    )
    order = scheduler.engine.claims.keeper.book._order + 1
    body = msgspec.to_builtins(ClaimMessage(order, 0, question=question))

    def original(*_: object) -> None:
        raise AssertionError("SGLang would take the message for its own")

    plugin._control(original, scheduler, SimpleNamespace(method=CLAIMS_METHOD, body=body))
    (output,) = sent
    return output


def ask(
    scheduler: Scheduler, *spans: str, scope: str = "t", session: str = "s"
) -> LedgerAnswer | None:
    """The answer to a question."""
    question = LedgerQuestion(scope=scope, session=session, spans=spans)
    output = control(scheduler, msgspec.json.encode(question).decode())
    assert output.success
    return msgspec.json.decode(output.response[0]["answer"], type=ClaimAnswer).ledger
