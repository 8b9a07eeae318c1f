"""The engine's report on a request."""

from __future__ import annotations

import msgspec

from .claim_commands import ClaimRefusal
from .envelope import LineageRun, SkippedAction
from .proof import Proof
from .recompute import Extent
from .reuse import ReuseCounts
from .vocabulary import Mode, Outcome, Reason


class TokenCounts(msgspec.Struct, frozen=True):
    """Tokens by origin of their KV; ``prefix + spliced + reused + prefilled = prompt``."""

    prompt: int = 0
    prefix: int = 0
    """Tokens found in the radix tree, untouched."""
    spliced: int = 0
    """Tokens copied for an edit, from what the session itself had, and re-keyed."""
    reused: int = 0
    """Tokens copied because the same content was cached elsewhere, and re-keyed."""
    prefilled: int = 0
    freed: int = 0
    """Slots given back to the pool because of this request's edits."""

    @property
    def served(self) -> int:
        """Prompt tokens whose KV was there already: the prefix, and all that was copied."""
        return self.prefix + self.spliced + self.reused


class DirectiveResult(msgspec.Struct, frozen=True):
    """The outcome of one directive, by its index in the payload."""

    index: int
    mode: Mode
    reason: Reason


class ForgetCounts(msgspec.Struct, frozen=True):
    """Slots that a forget reached. The receipt is closed when none is pending any more."""

    overwritten: int = 0
    shared_retained: int = 0
    """Slots of other sessions that sent the same tokens themselves; no longer this session's."""
    pending: int = 0
    """Slots that can't be matched any more, and are overwritten when the running request that holds
    them ends. An engine that can't write to its pool's rows never reports them overwritten."""


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's account of one request.

    It comes with the answer (:mod:`.answer`), and is served by ``message_id``.
    """

    message_id: str
    session: str = ""
    turn: str = ""
    outcome: Outcome = Outcome.UNEDITED
    reason: Reason | None = None
    """Set exactly if the request carried an edit."""
    detail: str = ""
    """One sentence for people; never prompt text."""
    tokens: TokenCounts = TokenCounts()
    directives: tuple[DirectiveResult, ...] = ()
    forgot: ForgetCounts | None = None
    """Set exactly if the request demanded forgetting; changes until nothing is pending."""
    proof: Proof | None = None
    """Set exactly if the request demanded a proof and forgot; changes until it isn't pending."""
    reuse: ReuseCounts | None = None
    """Set exactly if the request asked for reuse, and the engine looked for it."""
    lineage: tuple[LineageRun, ...] = ()
    """The lineage map of the turn as it now lies in the cache."""
    extents: tuple[Extent, ...] = ()
    """Half-open token extents of the prompt that were spliced, sorted and merged where they meet.
    Empty if there are more than :data:`~.reuse.MAX_EXTENTS`."""
    skipped_actions: tuple[SkippedAction, ...] = ()
    state: str = ""
    """``kept`` if a recurrent state was copied: it holds what was cut from the prompt."""
    refused: ClaimRefusal | None = None
    """Set exactly if the request could not run because of claims (``Reason.REFUSED_BY_CLAIM``),
    before it began or while it decoded."""
    stages: int = 0
    """Forwards that computed gaps between copies before the request's own; each copy after a gap
    takes one."""
    splice_us: int = 0
    """Microseconds spent planning, copying and rotating."""


class TurnRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A receipt, together with the facts that later turns need to use this turn as a source."""

    receipt: Receipt
    finished: bool = False
    """False while tokens are still being generated."""
    output_ids: tuple[int, ...] = ()
    instance: str = ""
    """The run of the engine that wrote it, as in its capability; empty if the engine doesn't name
    it. After a router, only this says which engine has served the request."""
