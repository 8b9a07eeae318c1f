"""What a proxy asks of an engine about claims, and what it is answered.

One command is one ``POST`` to :data:`CLAIMS_PATH`. Where proxy and engine share a secret, the
header :data:`SIGNATURE_HEADER` carries the body's HMAC (:func:`~.signing.sign_bytes`).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import msgspec

from .claim import MAX_NAME, Claim

CLAIMS_PATH = "/leyline/claims"
SIGNATURE_HEADER = "x-leyline-signature"
MAX_COMMAND_BYTES = 64 << 10
MAX_LISTED = 1000
"""Claims or events in one answer."""

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME)]
_Count = Annotated[int, msgspec.Meta(ge=1, le=MAX_LISTED)]


class ClaimState(StrEnum):
    """Where a claim stands."""

    REQUESTED = "requested"
    ACCEPTED = "accepted"
    """In the book; the engine hasn't looked for its tokens yet, or they are being computed."""
    MATERIALIZED = "materialized"
    """Its predicate holds. A hard claim's tokens are locked, a soft one's ranked."""
    DEMOTED = "demoted"
    """A hard claim whose locks were given up; it goes on as a soft one."""
    REJECTED = "rejected"
    MATERIALIZATION_FAILED = "materialization_failed"
    EVICTED = "evicted"
    """A soft or demoted claim that gave way to a request."""
    EXPIRED = "expired"
    RELEASED = "released"
    HARMED = "harmed"
    """Its tokens were lost though nobody was allowed to take them."""

    @property
    def lives(self) -> bool:
        """Whether the claim may still protect anything."""
        return self in _LIVING


_LIVING = frozenset({ClaimState.ACCEPTED, ClaimState.MATERIALIZED, ClaimState.DEMOTED})


class ClaimStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A claim and where it stands."""

    claim: Claim
    state: ClaimState
    cause: str = ""
    """Why it ended as it did, where there is more to say than the state."""
    remaining_ms: int | None = None
    """Until it expires, by the engine's clock; None if it doesn't."""
    age_ms: int = 0
    """Since it was accepted."""
    resident_tokens: int = 0
    required_tokens: int = 0
    hits: int = 0
    """Requests that matched all that it holds."""
    pressure: int = 0
    """Requests that were refused while it was in their way, and evictions that passed it over."""


class SubmitClaim(msgspec.Struct, frozen=True, tag_field="command", tag="submit"):
    """Take a claim, or a later revision of one."""

    claim: Claim


class ReleaseClaim(msgspec.Struct, frozen=True, tag_field="command", tag="release"):
    """End a claim as its owner wishes."""

    tenant: _Name
    claim: _Name


class DemoteClaim(msgspec.Struct, frozen=True, tag_field="command", tag="demote"):
    """Give up a hard claim's locks; its tokens keep its priority."""

    tenant: _Name
    claim: _Name


class GetClaim(msgspec.Struct, frozen=True, tag_field="command", tag="get"):
    """Where a claim stands, also for a while after its end."""

    tenant: _Name
    claim: _Name


class ListClaims(msgspec.Struct, frozen=True, tag_field="command", tag="list"):
    """Live claims, oldest first: a tenant's, or all where none is named."""

    tenant: str = ""
    limit: _Count = MAX_LISTED


class GetClaimEvents(msgspec.Struct, frozen=True, tag_field="command", tag="events"):
    """Events behind number ``after``: those of one claim, or of all where none is named."""

    tenant: str = ""
    claim: str = ""
    after: Annotated[int, msgspec.Meta(ge=0)] = 0
    limit: _Count = MAX_LISTED


ClaimCommand = SubmitClaim | ReleaseClaim | DemoteClaim | GetClaim | ListClaims | GetClaimEvents


class ProblemCode(StrEnum):
    """Why a command wasn't carried out."""

    UNKNOWN_CLAIM = "unknown_claim"
    """No such claim, or another tenant's: the answer is the same."""
    INVALID_CLAIM = "invalid_claim"
    """``field`` has to change."""
    CLAIM_LIMIT = "claim_limit"
    """``field`` names the limit."""
    STALE_REVISION = "stale_revision"
    NOT_LOCKED = "not_locked"
    """Only a hard claim that is materialised can be demoted."""
    UNSUPPORTED = "unsupported"
    """This engine takes no claims."""


class ClaimProblem(msgspec.Struct, frozen=True):
    """A command that wasn't carried out; nothing was changed."""

    code: ProblemCode
    message: str
    field: str = ""


class ClaimReply(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's answer: the claims that were asked for, or that changed."""

    problem: ClaimProblem | None = None
    claims: tuple[ClaimStatus, ...] = ()
    events: tuple[dict[str, Any], ...] = ()
    seq: int = 0
    """The number of the newest event; what :attr:`GetClaimEvents.after` goes on from."""


class ClaimRefusal(msgspec.Struct, frozen=True, kw_only=True):
    """Why a request can't run beside the hard claims; tokens."""

    needed: int
    """Of the request, beyond what it shares with claims."""
    protected: int
    usable: int
    own: tuple[str, ...] = ()
    """Ids of the claims in the way that are of the request's own tenant."""
    others: int = 0
    """How many are other tenants'."""
    retry_after_ms: int | None = None
    """Until deadlines alone will have made room; None if it takes a release."""


def decode_command(body: bytes) -> ClaimCommand:
    """A command from its JSON.

    Raises:
        msgspec.DecodeError: not JSON, or no command; the text names the field.
    """
    command: ClaimCommand = _DECODER.decode(body)
    return command


_DECODER = msgspec.json.Decoder(ClaimCommand)
