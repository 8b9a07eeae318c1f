"""A proxy's commands to an engine about claims, and the engine's replies.

One command is one ``POST`` to :data:`CLAIMS_PATH`. If proxy and engine share a secret, the header
:data:`SIGNATURE_HEADER` carries the body's HMAC (:func:`~.signing.sign_bytes`).
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
"""Maximum number of claims or events in one answer."""

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME)]
_Count = Annotated[int, msgspec.Meta(ge=1, le=MAX_LISTED)]


class ClaimState(StrEnum):
    """The state of a claim."""

    REQUESTED = "requested"
    ACCEPTED = "accepted"
    """In the book; the engine hasn't looked for its tokens yet, or they are being computed."""
    MATERIALIZED = "materialized"
    """Its predicate holds. A hard claim's tokens are locked, a soft one's ranked."""
    DEMOTED = "demoted"
    """A hard claim whose locks were given up; it continues as a soft one."""
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
        """True if the claim may still protect anything."""
        return self in _LIVING


_LIVING = frozenset({ClaimState.ACCEPTED, ClaimState.MATERIALIZED, ClaimState.DEMOTED})


class ClaimStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A claim and its state."""

    claim: Claim
    state: ClaimState
    cause: str = ""
    """Reason why it ended, if the state doesn't say it all."""
    remaining_ms: int | None = None
    """Time until it expires, by the engine's clock; None if it doesn't."""
    age_ms: int = 0
    """Time since it was accepted."""
    resident_tokens: int = 0
    required_tokens: int = 0
    hits: int = 0
    """Number of requests that matched all that it holds."""
    pressure: int = 0
    """Number of requests refused while it was in their way, and evictions that passed it over."""


class SubmitClaim(msgspec.Struct, frozen=True, tag_field="command", tag="submit"):
    """Take a claim, or a later revision of one."""

    claim: Claim


class ReleaseClaim(msgspec.Struct, frozen=True, tag_field="command", tag="release"):
    """End a claim at its owner's wish."""

    tenant: _Name
    claim: _Name


class DemoteClaim(msgspec.Struct, frozen=True, tag_field="command", tag="demote"):
    """Give up a hard claim's locks; its tokens keep its priority."""

    tenant: _Name
    claim: _Name


class GetClaim(msgspec.Struct, frozen=True, tag_field="command", tag="get"):
    """Get a claim's status, also for a while after its end."""

    tenant: _Name
    claim: _Name


class ListClaims(msgspec.Struct, frozen=True, tag_field="command", tag="list"):
    """List live claims, oldest first: a tenant's, or all if none is named."""

    tenant: str = ""
    limit: _Count = MAX_LISTED


class GetClaimEvents(msgspec.Struct, frozen=True, tag_field="command", tag="events"):
    """Get events after number ``after``: those of one claim, or all if none is named."""

    tenant: str = ""
    claim: str = ""
    after: Annotated[int, msgspec.Meta(ge=0)] = 0
    limit: _Count = MAX_LISTED


ClaimCommand = SubmitClaim | ReleaseClaim | DemoteClaim | GetClaim | ListClaims | GetClaimEvents


class ProblemCode(StrEnum):
    """Reason why a command wasn't carried out."""

    UNKNOWN_CLAIM = "unknown_claim"
    """There is no such claim, or it is another tenant's: the answer is the same."""
    INVALID_CLAIM = "invalid_claim"
    """The value of ``field`` has to change."""
    CLAIM_LIMIT = "claim_limit"
    """A limit is exceeded; ``field`` names it."""
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
    """The engine's answer: the claims that were requested, or that changed."""

    problem: ClaimProblem | None = None
    claims: tuple[ClaimStatus, ...] = ()
    events: tuple[dict[str, Any], ...] = ()
    seq: int = 0
    """Number of the newest event, from which :attr:`GetClaimEvents.after` continues."""


class ClaimRefusal(msgspec.Struct, frozen=True, kw_only=True):
    """Reason why a request can't run beside the hard claims; in tokens."""

    needed: int
    """Tokens that the request needs beyond those that it shares with claims."""
    protected: int
    usable: int
    own: tuple[str, ...] = ()
    """Ids of the claims in the way that are the request's own tenant's."""
    others: int = 0
    """Number of those that are other tenants'."""
    retry_after_ms: int | None = None
    """Time until deadlines alone will have made room; None if it takes a release."""


def decode_command(body: bytes) -> ClaimCommand:
    """Decode a command from its JSON.

    Raises:
        msgspec.DecodeError: not JSON, or not a command; the text names the field.
    """
    command: ClaimCommand = _DECODER.decode(body)
    return command


_DECODER = msgspec.json.Decoder(ClaimCommand)
