"""An engine that takes claims and computes nothing: a real book over turns that it only counts.

Every turn that is reported to it is resident from end to end until someone evicts it. Its clock
moves only when a test moves it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from functools import cache
from typing import Any
from uuid import uuid4

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from support.fake_engine import CAPABILITY, MODEL, chat_json, chunk
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from leyline_engine.claims.answers import UnknownClaimError
from leyline_engine.claims.book import ClaimBook
from leyline_engine.claims.events import ClaimEvent, EventLedger, Run
from leyline_engine.claims.feasibility import Arithmetic, Demand, Feasibility
from leyline_engine.claims.limits import ClaimRefusedError, Limits
from leyline_engine.contract import (
    CLAIMS_PATH,
    RENDERER_PATH,
    SIGNATURE_HEADER,
    Claim,
    ClaimCommand,
    ClaimProblem,
    ClaimRefusal,
    ClaimReply,
    ClaimStatus,
    EditPayload,
    GetClaim,
    GetClaimEvents,
    ListClaims,
    ProblemCode,
    Reason,
    Receipt,
    ReleaseClaim,
    SubmitClaim,
    TokenCounts,
    TurnRecord,
    decode_command,
    is_signature_of,
    parse_envelope,
    split_actions,
)
from leyline_proxy.render import ChatRenderer

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIALS = ("<|im_start|>", "<|im_end|>")
OUTPUT = (65, 66)


@cache
def tokenizer_json() -> str:
    """One token per byte, and the two special ones."""
    vocabulary = {name: n for n, name in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name) for name in SPECIALS])
    return str(tokenizer.to_str())


@cache
def renderer() -> ChatRenderer:
    """The engine's own."""
    return ChatRenderer(TEMPLATE, {}, tokenizer_json())


class ClaimsEngine:
    """An ASGI application with the paths of an engine."""

    def __init__(self, *, pool: int = 4096, secret: str | None = None, **limits: Any) -> None:
        self.secret = secret
        self.commands: list[ClaimCommand] = []
        self.open = asyncio.Event()
        """Claims wait while it isn't set."""
        self.open.set()
        self.failing = False
        """Claims are answered with an error."""
        self.breaks_off: int | None = None
        """Chunks of a refused stream before its error; None answers with a status."""
        self.forgets_records = False
        """The outcome of a request is never reported."""
        self._pool, self._limits = pool, Limits(**limits)
        self.restart()
        self._app = Starlette(
            routes=[
                Route("/v1/models", self._models),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/leyline/capability", self._capability),
                Route("/leyline/receipts/{message_id}", self._record),
                Route(RENDERER_PATH, self._renderer),
                Route("/tokenize", self._tokenize, methods=["POST"]),
                Route(CLAIMS_PATH, self._claims, methods=["POST"]),
            ]
        )

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """ASGI."""
        await self._app(scope, receive, send)

    def restart(self) -> None:
        """Another run: nothing of the one before is left."""
        self.instance = f"run-{uuid4().hex[:8]}"
        self.ledger = EventLedger()
        self.book = ClaimBook(self._pool, Arithmetic(), self.ledger, limits=self._limits)
        self.sources: dict[str, int] = {}
        """Tokens of retained turns that have KV: the last was generated and never read."""
        self.records: dict[str, TurnRecord] = {}
        self._ticks = 0

    def pass_time(self, seconds: float) -> None:
        """Move the clock."""
        self._ticks += 1
        self.book.tick(self._ticks, self.book.now_ms + round(seconds * 1000))

    def live(self, tenant: str = "") -> tuple[ClaimStatus, ...]:
        """Live claims in the book."""
        return self.book.live(tenant)

    def submitted(self) -> list[Claim]:
        """Claims that were asked for, in order."""
        return [command.claim for command in self.commands if isinstance(command, SubmitClaim)]

    async def _models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    async def _capability(self, _: Request) -> Response:
        capability = msgspec.structs.replace(
            CAPABILITY,
            actions=(*CAPABILITY.actions, "leyline.claim@1.0"),
            instance=self.instance,
        )
        return JSONResponse(msgspec.to_builtins(capability))

    async def _renderer(self, _: Request) -> Response:
        return JSONResponse(
            {
                "chat_template": TEMPLATE,
                "special_tokens": {},
                "tokenizer_json": tokenizer_json(),
            }
        )

    async def _tokenize(self, request: Request) -> Response:
        return JSONResponse({"tokens": _tokens(await request.json())})

    async def _record(self, request: Request) -> Response:
        record = self.records.get(request.path_params["message_id"])
        if record is None or self.forgets_records:
            return JSONResponse({}, status_code=404)
        return JSONResponse(msgspec.to_builtins(record))

    async def _chat(self, request: Request) -> Response:
        body = await request.json()
        envelope = parse_envelope(body["custom_params"]["kv_hints"])
        payload = split_actions(envelope).edit
        assert payload is not None
        tokens = len(_tokens(body))
        refusal = self._refusal(payload, tokens, body.get("max_tokens", 16))
        receipt = Receipt(
            message_id=envelope.message_id, tokens=TokenCounts(prompt=tokens, prefilled=tokens)
        )
        if refusal is not None:
            reason = Reason.REFUSED_BY_CLAIM
            receipt = msgspec.structs.replace(receipt, reason=reason, refused=refusal)
            self.records[envelope.message_id] = TurnRecord(receipt=receipt, finished=True)
            if self.breaks_off is not None:
                events = _broken_off(self.breaks_off)
                return StreamingResponse(events, media_type="text/event-stream")
            return JSONResponse({"error": {"message": "no room", "code": 503}}, status_code=503)
        self.sources[payload.turn] = tokens + len(OUTPUT) - 1
        self.records[envelope.message_id] = TurnRecord(
            receipt=receipt, finished=True, output_ids=OUTPUT
        )
        return Response(b"".join(chat_json("AB").chunks), media_type="application/json")

    def _refusal(self, payload: EditPayload, tokens: int, output: int) -> ClaimRefusal | None:
        demand = Demand(payload.scope, tokens, output)
        admission = self.book.check(demand)
        if admission.feasibility is not Feasibility.BLOCKED:
            return None
        self.book.tell_pressure(admission.blocking)
        return ClaimRefusal(
            needed=admission.needed,
            protected=admission.protected,
            usable=admission.usable,
            own=tuple(name for tenant, name in admission.blocking if tenant == payload.scope),
            others=sum(tenant != payload.scope for tenant, _ in admission.blocking),
            retry_after_ms=admission.retry_after_ms,
        )

    async def _claims(self, request: Request) -> Response:
        body = await request.body()
        await self.open.wait()
        given = request.headers.get(SIGNATURE_HEADER, "")
        if self.secret is not None and not is_signature_of(given, body, self.secret):
            return JSONResponse({}, status_code=401)
        if self.failing:
            return JSONResponse({}, status_code=500)
        command = decode_command(body)
        self.commands.append(command)
        return Response(msgspec.json.encode(self._carry_out(command)))

    def _carry_out(self, command: ClaimCommand) -> ClaimReply:
        try:
            claims, events = self._answer(command)
        except UnknownClaimError as error:
            problem = ClaimProblem(ProblemCode.UNKNOWN_CLAIM, str(error))
            return ClaimReply(problem=problem, seq=self.ledger.last)
        except ClaimRefusedError as error:
            code = {"revision": ProblemCode.STALE_REVISION}.get(error.field)
            is_field = "." in error.field
            code = code or (ProblemCode.INVALID_CLAIM if is_field else ProblemCode.CLAIM_LIMIT)
            problem = ClaimProblem(code, str(error), error.field)
            return ClaimReply(problem=problem, seq=self.ledger.last)
        return ClaimReply(claims=claims, events=events, seq=self.ledger.last)

    def _answer(
        self, command: ClaimCommand
    ) -> tuple[tuple[ClaimStatus, ...], tuple[dict[str, Any], ...]]:
        if isinstance(command, SubmitClaim):
            claim = command.claim
            length = self.sources.get(claim.predicate.source)
            self.book.submit(claim, length)
            span = Run(claim.predicate.source, claim.predicate.start, claim.predicate.end)
            self.book.seek((claim.tenant, claim.id), (span,))
            return (self.book.status(claim.tenant, claim.id),), ()
        if isinstance(command, ListClaims):
            return self.book.live(command.tenant)[: command.limit], ()
        if isinstance(command, GetClaimEvents):
            return (), self._events(command)
        if isinstance(command, ReleaseClaim):
            self.book.release(command.tenant, command.claim)
        elif not isinstance(command, GetClaim):
            self.book.demote(command.tenant, command.claim)
        return (self.book.status(command.tenant, command.claim),), ()

    def _events(self, command: GetClaimEvents) -> tuple[dict[str, Any], ...]:
        found = [event for event in self.ledger if event.seq > command.after]
        if command.claim:
            key = (command.tenant, command.claim)
            found = [e for e in found if isinstance(e, ClaimEvent) and (e.tenant, e.claim) == key]
        return tuple(msgspec.to_builtins(event) for event in found[: command.limit])


def text_of(messages: list[dict[str, Any]], start: int, end: int) -> str:
    """The text of tokens ``[start, end)`` of a prompt."""
    tokens = _tokens({"messages": messages})[start:end]
    decoded: str = Tokenizer.from_str(tokenizer_json()).decode(tokens, skip_special_tokens=False)
    return decoded


def _tokens(body: dict[str, Any]) -> list[int]:
    members = {key: value for key, value in body.items() if key != "messages"}
    return list(renderer().render_request(body["messages"], members).tokens)


async def _broken_off(chunks: int) -> AsyncIterator[bytes]:
    for _ in range(chunks):
        yield chunk({"role": "assistant", "content": "A"})
    error = {"message": "outgrew its room", "type": "server_error", "code": 503}
    yield b"data: " + json.dumps({"error": error}).encode() + b"\n\n"
