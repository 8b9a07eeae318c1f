"""Claims on a real SGLang server: signed commands and turns, and what is refused for claims."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import httpx
import msgspec
from engine_client import EngineClient, new_message_id, request_body
from sglang_server import SglangServer

from leyline_engine.contract import (
    CLAIMS_PATH,
    SIGNATURE_HEADER,
    Claim,
    ClaimCommand,
    ClaimKind,
    ClaimReply,
    ClaimStatus,
    DemoteClaim,
    EditPayload,
    GetClaim,
    ListClaims,
    Predicate,
    ReleaseClaim,
    SubmitClaim,
    TurnRecord,
    edit_envelope,
    sign_bytes,
    sign_envelope,
)

SECRET = "a secret of the test"
WAIT_S = 15.0
_CLAIMS = count(1)


class ClaimClient(EngineClient):
    """A client that may be one of several tenants.

    Args:
        secret: what the server takes for the proxy's word.
        claim_id: what its claims are called; the engine remembers those that ended.
    """

    def __init__(self, base_url: str, secret: str, claim_id: str = "") -> None:
        super().__init__(base_url)
        self._secret = secret
        self.id = claim_id or f"c{next(_CLAIMS)}"

    # Commands.

    def post_command(self, body: bytes, signature: str | None = None) -> httpx.Response:
        """One command as bytes, rightly signed unless asked otherwise."""
        signature = sign_bytes(body, self._secret) if signature is None else signature
        headers = {SIGNATURE_HEADER: signature}
        return self.http.post(CLAIMS_PATH, content=body, headers=headers)

    def send(self, command: ClaimCommand) -> ClaimReply:
        """Send a command and return the engine's answer."""
        answer = self.post_command(msgspec.json.encode(command)).raise_for_status()
        return msgspec.json.decode(answer.content, type=ClaimReply)

    def claim(self, session: str, end: int, **terms: Any) -> ClaimReply:
        """Claim ``[start, end)`` of a session's turn, hard unless ``terms`` say otherwise."""
        span = Predicate(terms.pop("source", "t1"), terms.pop("start", 0), end)
        given = {"id": self.id, "tenant": "a", "kind": ClaimKind.HARD}
        return self.send(SubmitClaim(Claim(session=session, predicate=span, **(given | terms))))

    def show(self, claim: str = "", tenant: str = "a") -> ClaimReply:
        return self.send(GetClaim(tenant, claim or self.id))

    def status(self, claim: str = "", tenant: str = "a") -> ClaimStatus:
        """A claim that there is."""
        (status,) = self.show(claim, tenant).claims
        return status

    def release(self, claim: str = "", tenant: str = "a") -> ClaimReply:
        return self.send(ReleaseClaim(tenant, claim or self.id))

    def demote(self, claim: str = "", tenant: str = "a") -> ClaimReply:
        return self.send(DemoteClaim(tenant, claim or self.id))

    def live(self, tenant: str = "") -> tuple[ClaimStatus, ...]:
        return self.send(ListClaims(tenant)).claims

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something to become true."""
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline, "it didn't become true"
            time.sleep(0.05)

    # Requests.

    def body(
        self, name: str, prompt: Sequence[int], payload: EditPayload, **options: Any
    ) -> dict[str, Any]:
        """A request with a signed envelope."""
        envelope = sign_envelope(edit_envelope(name, payload), self._secret)
        return request_body(prompt, envelope, **options)

    def open(
        self, session: str, prompt: Sequence[int], *, tenant: str = "a", turn: str = "t1"
    ) -> TurnRecord:
        """Run a turn that edits nothing."""
        name = new_message_id()
        payload = EditPayload(session=session, scope=tenant, turn=turn)
        self.post(self.body(name, prompt, payload, decode=2))
        return self.record(name)


def text(seed: str, length: int) -> list[int]:
    """Random tokens."""
    rng = Random(seed)
    return [rng.randrange(10, 400) for _ in range(length)]


@contextmanager
def claim_server(model: Path, log: Path, flags: tuple[str, ...]) -> Iterator[SglangServer]:
    """A server that knows :data:`SECRET`, whose log must be clean in the end."""
    with SglangServer(model, log, flags, {"LEYLINE_HINTS_SECRET": SECRET}) as started:
        yield started
        started.check_clean()


@contextmanager
def claims_of(server: SglangServer) -> Iterator[ClaimClient]:
    """A client of a server without claims, which holds nothing afterwards."""
    with ClaimClient(server.base_url, SECRET) as opened:
        opened.http.post("/flush_cache").raise_for_status()
        yield opened
        for status in opened.live():
            opened.release(status.claim.id, status.claim.tenant)
        opened.wait_idle()
