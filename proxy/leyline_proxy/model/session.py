"""What the proxy remembers of a conversation: turns as sources, and an account without text."""

from __future__ import annotations

import re
from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from leyline_engine.contract import LineageRun, Outcome, Reason, Receipt, output_span

from .prepared import Prepared
from .rendered import Rendered
from .spans import SpanName, SpanNames

MAX_HISTORY = 512
MAX_DEPARTED = 4096
"""Names of turns past that a session remembers."""

_TURN_NAME = re.compile(r"t(\d+)\b")

_NAME_BYTES = 160
"""A name and the fingerprint that it is found by."""


def turn_name(index: int, unique: str) -> str:
    """The name under which an engine retains a turn.

    Args:
        index: the turn's number in its session, from 0.
        unique: what no other turn of that number has.
    """
    return f"t{index}-{unique}"


def turn_index(name: str) -> int | None:
    """The number in the name of a turn, or of a message that a turn brought; None for others."""
    found = _TURN_NAME.match(name)
    return int(found[1]) if found else None


EditMode = Literal["amortize", "forget", "exact"]
"""How an edit reaches the cache; ``exact`` is an ordinary re-prefill behind it."""


@dataclass(frozen=True)  # no slots: the token sequence is computed once
class RetainedTurn:
    """A turn whose KV the engine may still hold."""

    turn: str
    """Name under which the engine retains it."""
    index: int
    prepared: Prepared
    rendered: Rendered
    """The prompt alone."""
    output_ids: tuple[int, ...]
    lineage: tuple[LineageRun, ...]
    receipt: Receipt | None
    digest: str
    """:func:`leyline_engine.contract.token_digest` over :attr:`tokens`."""
    model_fingerprint: str
    weight: int = 0
    """Bytes that the turn takes in memory, roughly."""
    names: SpanNames = field(kw_only=True)
    """Under which the engine's ledger knows the messages."""
    replica: str = field(default="", kw_only=True)
    """Name of the upstream that served it."""
    model: str = field(default="", kw_only=True)
    """As the caller named it."""

    @cached_property
    def tokens(self) -> array[int]:
        """Prompt and generated tokens."""
        return self.rendered.tokens + array("q", self.output_ids)

    @cached_property
    def names_by_print(self) -> Mapping[int, tuple[SpanName, ...]]:
        """The client's messages by fingerprint."""
        found: dict[int, tuple[SpanName, ...]] = {}
        for value, name in zip(self.prepared.client_fingerprints, self.names.client, strict=True):
            found[value] = (*found.get(value, ()), name)
        return found


@dataclass(frozen=True, slots=True)
class Departed:
    """Names of what the session once held and no retained turn knows any more."""

    messages: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    """By the message's fingerprint."""
    outputs: tuple[str, ...] = ()
    """Answers that no client list has held."""

    @property
    def size(self) -> int:
        """How many names there are."""
        return sum(map(len, self.messages.values())) + len(self.outputs)

    def after(self, gone: Sequence[RetainedTurn], kept: Sequence[RetainedTurn]) -> Departed | None:
        """With what ``gone`` held and ``kept`` doesn't; None when that is too much to remember."""
        if not gone:
            return self
        held = {
            (value, name.id)
            for turn in kept
            for value, names in turn.names_by_print.items()
            for name in names
        }
        messages = dict(self.messages)
        for turn in gone:
            for value, names in turn.names_by_print.items():
                lost = [each for name in names if (value, name.id) not in held for each in name.all]
                if lost:
                    messages[value] = tuple(dict.fromkeys((*messages.get(value, ()), *lost)))
        claimed = {name.id for turn in (*gone, *kept) for name in turn.names.client}
        outputs = (output_span(turn.turn) for turn in gone if turn.output_ids)
        result = Departed(
            messages, (*self.outputs, *(name for name in outputs if name not in claimed))
        )
        return result if result.size <= MAX_DEPARTED else None


@dataclass(frozen=True, slots=True)
class EditRecord:
    """One edit of a turn, for the caller, the metrics and the audit log."""

    message: int | None
    """Index into the client's messages; None where the message is gone or none is concerned."""
    role: str
    cause: str
    """``policy:NAME``, ``declared``, ``undeclared``, ``template`` or ``tools``."""
    mode: EditMode
    span: tuple[int, int] | None
    """Tokens of the source, half open; None where tokens are unknown."""
    replacement_tokens: int
    cached: bool = True
    """Whether it concerns KV of an earlier turn; see :mod:`.uncached`."""


@dataclass(frozen=True, slots=True)
class TurnSummary:
    """A turn without its text."""

    index: int
    turn: str
    created: float
    """Seconds since the epoch."""
    planned: Outcome
    reason: Reason | None
    edits: tuple[EditRecord, ...]
    receipt: Receipt | None


@dataclass(frozen=True, slots=True)
class Place:
    """A run of an engine that may hold KV of a session."""

    replica: str
    """Name of the upstream that it ran on."""
    owed: bool = False
    """A forget was demanded since, which this run hasn't confirmed."""
    changes: int = 0
    """How many turns it was given and forgets it came to owe."""


@dataclass(frozen=True, slots=True)
class Session:
    """One conversation of one tenant."""

    id: str
    tenant: str
    key: str
    turns: tuple[RetainedTurn, ...]
    """Newest last."""
    history: tuple[TurnSummary, ...]
    next_index: int
    updated: float
    created: float = 0.0
    """Both in seconds since the epoch."""
    departed: Departed = field(default_factory=Departed)
    policy_states: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """What policies left for the next turn, by their place in the pipeline."""
    completions: Mapping[str, str] = field(default_factory=dict, repr=False)
    """What models have written for policies, by the policy's place and its question."""
    unnamed: int = 0
    """Losses of account, each of which the engine may hold something of that has no name here:
    turns that were begun and never retained, and names that were too many to remember."""
    places: Mapping[str, Place] = field(default_factory=dict)
    """Runs of engines (see ``UpstreamStatus.retains_as``) that were given turns of this session
    and may hold its KV."""
    unvouched: bool = False
    """Its name may have been in use before this proxy learned of it, and no forget of everything
    has been confirmed since."""
    demands: int = 0
    """Turns that demanded to forget something. A turn that was under way meanwhile may have left in
    the cache what it read."""
    in_flight: frozenset[str] = frozenset()
    """Turns that an engine was given and that aren't settled: other requests of now, or those of a
    proxy that was killed. The store adds them; see ``SessionStore.open_turn``."""
    untraced: int = 0
    """Messages of turns before this number may lie in a cache where no forget finds them: the
    conversation was under way when it came without a name, or an engine was not told whose they
    are."""

    @property
    def answered(self) -> bool:
        """Whether any turn was answered in full; else there is nothing to tell of it."""
        return self.next_index > 0

    @property
    def weight(self) -> int:
        """Bytes that the session takes, roughly."""
        written = sum(map(len, self.completions.values()))
        held = sum(turn.weight for turn in self.turns)
        return held + written + _NAME_BYTES * self.departed.size

    def retain(
        self, turn: RetainedTurn | None, summary: TurnSummary, *, keep: int, now: float
    ) -> Session:
        """The session after a turn: the last ``keep`` turns stay as sources.

        Without ``turn`` (the engine doesn't hold it) only the account grows.
        """
        turns = self.turns if turn is None else (*self.turns, turn)
        first = max(0, len(turns) - keep)
        session = self._with_turns(turns[first:], gone=turns[:first])
        return replace(
            session,
            history=(*self.history, summary)[-MAX_HISTORY:],
            next_index=max(self.next_index, summary.index) + 1,
            updated=now,
        )

    def forget_sources(self) -> Session:
        """The session without its sources: token ids are prompt text and go with a forget."""
        return self._with_turns((), gone=self.turns)

    def without(self, turns: Collection[str]) -> Session:
        """The session without the sources of these names: the engine doesn't hold them."""
        gone = [turn for turn in self.turns if turn.turn in turns]
        kept = tuple(turn for turn in self.turns if turn.turn not in turns)
        return self._with_turns(kept, gone=gone)

    def take_name(self, key: str, shown: Sequence[int]) -> Session:
        """The session under the store key of those that have a certain name; itself where it is.

        One that was found by its history may have got turns of another conversation. Those stay
        sources of which its caller's list has all the messages.

        Args:
            shown: fingerprints of that list.
        """
        if self.key == key:
            return self
        had = set(shown)
        others = {
            turn.turn
            for turn in self.turns
            if not had.issuperset(turn.prepared.client_fingerprints)
        }
        return replace(self.without(others), key=key)

    def account_for(self, losses: int) -> Session:
        """The session after a forget of everything, which was planned after so many losses."""
        unnamed = max(0, self.unnamed - losses)
        return replace(self, departed=Departed(), unnamed=unnamed, unvouched=False)

    def lose_turn(self) -> Session:
        """The session after a turn that the engine may have read and that isn't retained."""
        return replace(self, unnamed=self.unnamed + 1)

    def without_text(self) -> Session:
        """The account alone: nothing in it is prompt text or derived from it, and what the engine
        holds of the session has no names any more."""
        unnamed = bool(self.turns or self.departed.size)
        return replace(
            self,
            turns=(),
            departed=Departed(),
            policy_states={},
            completions={},
            unnamed=self.unnamed + unnamed,
        )

    def _with_turns(
        self, turns: tuple[RetainedTurn, ...], *, gone: Sequence[RetainedTurn]
    ) -> Session:
        departed = self.departed.after(gone, turns)
        if departed is None:
            return replace(self, turns=turns, departed=Departed(), unnamed=self.unnamed + 1)
        return replace(self, turns=turns, departed=departed)
