"""The proxy's memory of a conversation: turns as sources, and an account without text."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from leyline_engine.contract import LineageRun, Outcome, Reason, Receipt, output_span, token_digest

from .asides import Aside
from .history import CONTINUES
from .paid import Paid
from .prepared import Prepared
from .readings import Readings
from .rendered import Rendered
from .sentences import Sentence
from .spans import SpanName, SpanNames
from .verdicts import Verdict

MAX_HISTORY = 512
MAX_DEPARTED = 4096
"""Largest number of names of past turns that a session remembers."""

MAX_QUESTIONS = 2
"""Number of policies' questions and transcripts that stay as sources beside the own turns."""

_NAME_BYTES = 160
"""Size of a name and its fingerprint."""

_VERDICT_BYTES = 512


def turn_name(index: int, unique: str) -> str:
    """Return the name under which an engine retains a turn.

    Args:
        index: the turn's number in its session, from 0.
        unique: a part that no other turn of that number has.
    """
    return f"t{index}-{unique}"


EditMode = Literal["amortize", "forget", "exact"]
"""The path of an edit to the cache; ``exact`` is an ordinary re-prefill after it."""


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
    """Approximate bytes in memory."""
    names: SpanNames = field(kw_only=True)
    """Names of the messages in the engine's ledger."""
    replica: str = field(default="", kw_only=True)
    """Name of the upstream that served it."""
    model: str = field(default="", kw_only=True)
    """The model's name as the caller gave it, with that of its adapter."""
    sentences: tuple[Sentence, ...] = field(default=(), kw_only=True)
    """Those of its answer, if that is a text without calls: a later list may quote it."""
    for_policy: bool = field(default=False, kw_only=True)
    """True if a policy asked in it: the client has neither its last message nor its answer."""
    offers_tools: bool = field(default=False, kw_only=True)
    """True if its request offered the model tools of the client's."""
    retells: bool = field(default=False, kw_only=True)
    """True if its request was a transcript of the session, to be summarised."""

    @property
    def is_apart(self) -> bool:
        """True if it is no step of the conversation, but is about it."""
        return self.for_policy or self.retells

    @property
    def is_lone(self) -> bool:
        """True if it offered no tools and had no answer yet, like a request for a title."""
        roles = {str(message.get("role")) for message in self.prepared.client}
        return not self.offers_tools and CONTINUES.isdisjoint(roles)

    @cached_property
    def tokens(self) -> array[int]:
        """Prompt and generated tokens."""
        return self.rendered.tokens + array("q", self.output_ids)

    def without_tokens(self) -> RetainedTurn:
        """Return the turn as one that no engine holds."""
        rendered = Rendered(array("q"), (), self.rendered.context)
        return replace(
            self,
            rendered=rendered,
            output_ids=(),
            sentences=(),
            lineage=(),
            digest=token_digest(rendered.tokens),
            model_fingerprint="",
        )

    @cached_property
    def names_by_print(self) -> Mapping[int, tuple[SpanName, ...]]:
        """Names of the client's messages, by fingerprint."""
        found: dict[int, tuple[SpanName, ...]] = {}
        for value, name in zip(self.prepared.client_fingerprints, self.names.client, strict=True):
            found[value] = (*found.get(value, ()), name)
        return found


@dataclass(frozen=True, slots=True)
class Departed:
    """Names of messages that the session once held and no retained turn has."""

    messages: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    """Names by the message's fingerprint."""
    outputs: tuple[str, ...] = ()
    """Answers that were in no client list."""

    @property
    def size(self) -> int:
        """Number of names."""
        return sum(map(len, self.messages.values())) + len(self.outputs)

    def after(self, gone: Sequence[RetainedTurn], kept: Sequence[RetainedTurn]) -> Departed | None:
        """Return this with the names that only ``gone`` held; None for too many to remember."""
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
        # The client never has the answer to a policy's question.
        written = (turn for turn in gone if turn.output_ids and not turn.for_policy)
        outputs = (output_span(turn.turn) for turn in written)
        result = Departed(
            messages, (*self.outputs, *(name for name in outputs if name not in claimed))
        )
        return result if result.size <= MAX_DEPARTED else None


@dataclass(frozen=True, slots=True)
class EditRecord:
    """One edit of a turn, for the caller, the metrics and the audit log."""

    message: int | None
    """Index in the client's messages; None if the message is gone or the edit concerns none."""
    role: str
    cause: str
    """``policy:NAME``, ``declared``, ``undeclared``, ``compaction``, ``template`` or ``tools``."""
    mode: EditMode
    span: tuple[int, int] | None
    """Tokens of the source, half open; None if unknown."""
    replacement_tokens: int
    cached: bool = True
    """True if the edit concerns KV of an earlier turn; see :mod:`.uncached`."""


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
    paid: Paid | None = None
    """The reasons for its prefilled tokens."""
    model: str = ""
    """The model's name, as the request gave it; empty if it isn't known."""
    client: str = ""
    """The program that sent it, by its own word; empty if it gave none."""


@dataclass(frozen=True, slots=True)
class Place:
    """A run of an engine that may hold KV of a session."""

    replica: str
    """Name of the upstream that it ran on."""
    owed: bool = False
    """True if this run hasn't confirmed a forget that was demanded since."""
    changes: int = 0
    """Number of turns that the run received and of forgets that it came to owe."""


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
    """State that policies left for the next turn, by their place in the pipeline."""
    completions: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Texts that models wrote for policies, by the policy's place and its question."""
    unnamed: int = 0
    """Number of losses of account: turns that began and were never retained, and names that were
    too many to remember. For each, the engine may hold KV that has no name here."""
    places: Mapping[str, Place] = field(default_factory=dict)
    """Runs of engines (see ``UpstreamStatus.retains_as``) that received turns of this session and
    may hold its KV."""
    unvouched: bool = False
    """True if its name may have been in use before this proxy knew it, or a transcript of it was
    sent, whose texts have other names; and no forget of everything has been confirmed since."""
    demands: int = 0
    """Number of turns that demanded a forget. A concurrent turn may have left the forgotten text in
    the cache."""
    in_flight: frozenset[str] = frozenset()
    """Unsettled turns that an engine received: those of other current requests, or of a proxy that
    was killed. The store adds them; see ``SessionStore.open_turn``."""
    untraced: int = 0
    """Messages of turns before this number may be in a cache where no forget finds them: the
    conversation was under way when it came without a name, or the engine didn't learn whose they
    are."""
    verdicts: tuple[Verdict, ...] = ()
    """Messages in quarantine, oldest first."""
    readings: Readings = field(default_factory=Readings)
    """Texts that models wrote, and the messages that each had read."""
    asides: tuple[Aside, ...] = ()
    """Calls of the recall tool that the client doesn't see, oldest first."""
    recalled: bool = False
    """True if any evicted text was put back: KV may hold it under another message's name."""
    name: str = field(default="", repr=False)
    """The caller's name, if the id is another text; else empty. Kept as prompt text is."""
    tools: tuple[int, ...] = ()
    """Digests of the names of its tools in their first order; empty if that isn't kept."""

    @property
    def last(self) -> RetainedTurn | None:
        """The latest retained turn of the conversation itself; None if there is none."""
        return next((turn for turn in reversed(self.turns) if not turn.is_apart), None)

    @property
    def answered(self) -> bool:
        """True if a turn was answered in full; otherwise there is nothing to report."""
        return self.next_index > 0

    @property
    def weight(self) -> int:
        """Approximate bytes of the session."""
        written = sum(map(len, self.completions.values()))
        held = sum(turn.weight for turn in self.turns)
        names = self.departed.size + self.readings.size
        named = _NAME_BYTES * names + _VERDICT_BYTES * len(self.verdicts)
        aside = sum(each.weight for each in self.asides)
        return held + written + named + aside

    def retain(
        self, turn: RetainedTurn | None, summary: TurnSummary, *, keep: int, now: float
    ) -> Session:
        """Return the session after a turn, with the client's last ``keep`` turns as sources.

        Policies' questions and transcripts don't count; each stays a turn longer than the turns
        before it. Without ``turn`` (the engine doesn't hold it) only the account grows.
        """
        turns = self.turns if turn is None else (*self.turns, turn)
        stay = _staying(turns, keep)
        gone = [each for at, each in enumerate(turns) if at not in stay]
        session = self._with_turns(tuple(turns[at] for at in stay), gone=gone)
        return replace(
            session,
            history=(*self.history, summary)[-MAX_HISTORY:],
            next_index=max(self.next_index, summary.index) + 1,
            updated=now,
        )

    def forget_sources(self) -> Session:
        """Return the session without its sources: a forget removes token ids, as prompt text."""
        return self._with_turns((), gone=self.turns)

    def without_tokens(self) -> Session:
        """Return the session without token ids; its last messages remain, and keep their names."""
        last = self.last
        if last is None:
            return self.forget_sources()
        gone = [turn for turn in self.turns if turn is not last]
        kept = self._with_turns((last.without_tokens(),), gone=gone)
        if last.output_ids:
            outputs = (*kept.departed.outputs, output_span(last.turn))
            kept = replace(kept, departed=replace(kept.departed, outputs=outputs))
        return kept

    def without(self, turns: Collection[str]) -> Session:
        """Return the session without the sources of these names: the engine doesn't hold them."""
        gone = [turn for turn in self.turns if turn.turn in turns]
        kept = tuple(turn for turn in self.turns if turn.turn not in turns)
        return self._with_turns(kept, gone=gone)

    def take_name(self, key: str, shown: Sequence[int]) -> Session:
        """Return the session under a store key for certain names, as :meth:`shown_to` has it; the
        same session if it has that key."""
        return self if self.key == key else replace(self.shown_to(shown), key=key)

    def shown_to(self, shown: Sequence[int]) -> Session:
        """Return the part of the session that a caller knows already.

        A session found by its history, or by its id alone, may contain turns of another
        conversation. Only turns whose messages are all in the caller's list remain sources; if
        there are others, texts that policies and models left go.

        Args:
            shown: fingerprints of that list.
        """
        had = set(shown)
        others = {
            turn.turn
            for turn in self.turns
            if not had.issuperset(turn.prepared.client_fingerprints)
        }
        if not others:
            return self
        return replace(self.without(others), policy_states={}, completions={}, asides=())

    def account_for(self, losses: int) -> Session:
        """Return the session after a forget of everything that was planned after so many losses."""
        unnamed = max(0, self.unnamed - losses)
        return replace(self, departed=Departed(), unnamed=unnamed, unvouched=False)

    def lose_turn(self) -> Session:
        """Return the session after a turn that the engine may have read but that isn't retained."""
        return replace(self, unnamed=self.unnamed + 1)

    def without_text(self) -> Session:
        """Return the account alone, without prompt text; the engine's KV then has no names."""
        unnamed = bool(self.turns or self.departed.size)
        return replace(
            self,
            turns=(),
            departed=Departed(),
            # From the next turn on, messages have other names.
            readings=Readings().lose(self.next_index),
            policy_states={},
            completions={},
            asides=(),
            unnamed=self.unnamed + unnamed,
            name="",
        )

    def _with_turns(
        self, turns: tuple[RetainedTurn, ...], *, gone: Sequence[RetainedTurn]
    ) -> Session:
        departed = self.departed.after(gone, turns)
        if departed is None:
            return replace(
                self,
                turns=turns,
                departed=Departed(),
                unnamed=self.unnamed + 1,
                readings=self.readings.lose(self.next_index),
            )
        return replace(self, turns=turns, departed=departed)


def _staying(turns: Sequence[RetainedTurn], keep: int) -> list[int]:
    """Return the indices of the turns that stay as sources; see :meth:`Session.retain`."""
    own = [at for at, turn in enumerate(turns) if not turn.is_apart]
    first = own[-keep - 1] if len(own) > keep else 0
    asked = [at for at, turn in enumerate(turns) if turn.is_apart and at >= first]
    return sorted([*own[-keep:], *asked[-MAX_QUESTIONS:]])
