"""Replay of recorded sessions to a pipeline as in the proxy, without an engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from leyline_policies import Memo, Policy, approximate_tokens
from leyline_proxy.edits.prepare import Limit, PolicySession, prepare
from leyline_proxy.model.messages import Message
from leyline_proxy.model.prepared import (
    Change,
    FaultOrigin,
    PolicyFault,
    Prepared,
)

from ..sums import Sums
from .prefill import CachedMessage, prefix_prefill, promises, splice_prefill

_TOKENS = "trial tokens"
_ORIGINS = 3
"""Largest number of places that are shown for one kind of fault."""

Edits = frozenset[tuple[str, int, int]]
"""Policy, fingerprint of the client's message, fingerprint of the sent one (0 for none)."""


@dataclass(frozen=True, slots=True)
class TrialOptions:
    """Facts for policies that recordings don't contain."""

    window: int | None = None
    """The model's context window, in tokens."""
    idle_s: float = 0.0
    """Seconds between two turns."""
    anchor_tokens: int = 1
    """Tokens between two anchors of a model with recurrent layers; 1 for other models."""


@dataclass(frozen=True, slots=True)
class PolicyFigures(Sums):
    """The effects of one policy."""

    edits: int = 0
    """Messages that are sent edited, dropped, or inserted by the policy."""
    new_edits: int = 0
    """Edits that weren't there on the turn before."""
    reclaimed_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Prefill(Sums):
    """Tokens to prefill, by the sent messages and the cache's abilities."""

    unedited: int = 0
    """Without policies, on a prefix cache."""
    prefix: int = 0
    """With policies, on a prefix cache."""
    splice: int = 0
    """With policies, spliced."""


@dataclass(frozen=True, slots=True)
class TurnTrial:
    """One turn."""

    original_tokens: int
    sent_tokens: int
    prefill: Prefill
    policies: Mapping[str, PolicyFigures]
    faults: tuple[PolicyFault, ...]
    notes: Mapping[str, int]
    """Number of times that each ``POLICY:KIND`` was noted."""
    refused: bool = False
    """True if the proxy would refuse the request, because a policy that forgets fails."""


@dataclass(frozen=True, slots=True)
class SessionTrial:
    """One session, turn by turn."""

    id: str
    turns: tuple[TurnTrial, ...]


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over turns."""

    turns: int
    original_tokens: int
    sent_tokens: int
    prefill: Prefill
    policies: Mapping[str, PolicyFigures]
    faults: Mapping[str, int]
    """Number of faults by ``POLICY:FAULT``."""
    origins: Mapping[str, tuple[FaultOrigin, ...]]
    """Places at which policies raised or hung, by ``POLICY:FAULT``."""
    notes: Mapping[str, int]
    refused: int = 0
    """Number of requests that the proxy would refuse."""

    @property
    def reclaimed_tokens(self) -> int:
        """Prompt tokens that aren't sent."""
        return self.original_tokens - self.sent_tokens

    def to_json(self) -> dict[str, Any]:
        """Return the form that `leyline policies try --json` writes."""
        return {
            "turns": self.turns,
            **_tokens_json(self.original_tokens, self.sent_tokens, self.prefill),
            "policies": {name: asdict(each) for name, each in self.policies.items()},
            "faults": dict(self.faults),
            "fault_origins": {
                name: [asdict(each) for each in found] for name, found in self.origins.items()
            },
            "notes": dict(self.notes),
            "refused": self.refused,
        }


@dataclass(frozen=True, slots=True)
class TrialReport:
    """A pipeline on several sessions."""

    sessions: tuple[SessionTrial, ...]

    def totals(self) -> Totals:
        """Return the sums over all sessions."""
        return total([turn for session in self.sessions for turn in session.turns])

    def hanging(self) -> frozenset[str]:
        """Return the policies that took too long on any turn."""
        turns = (turn for session in self.sessions for turn in session.turns)
        faults = (fault for turn in turns for fault in turn.faults)
        return frozenset(each.policy for each in faults if each.fault == "timed_out")

    def to_json(self) -> dict[str, Any]:
        """Return sums, sessions and turns in the form of `leyline policies try --json`."""
        return {
            "total": self.totals().to_json(),
            "sessions": [
                {
                    "id": session.id,
                    **total(session.turns).to_json(),
                    "by_turn": [_turn_json(turn) for turn in session.turns],
                }
                for session in self.sessions
            ],
        }


def total(turns: Sequence[TurnTrial]) -> Totals:
    """Return the sums over turns."""
    policies: dict[str, PolicyFigures] = {}
    faults: Counter[str] = Counter()
    origins: dict[str, dict[FaultOrigin, None]] = {}
    notes: Counter[str] = Counter()
    for turn in turns:
        for name, figures in turn.policies.items():
            policies[name] = policies.get(name, PolicyFigures()) + figures
        for fault in turn.faults:
            key = f"{fault.policy}:{fault.fault}"
            faults[key] += 1
            if fault.origin is not None:
                origins.setdefault(key, {}).setdefault(fault.origin)
        notes.update(turn.notes)
    return Totals(
        len(turns),
        sum(turn.original_tokens for turn in turns),
        sum(turn.sent_tokens for turn in turns),
        sum((turn.prefill for turn in turns), Prefill()),
        policies,
        faults,
        {key: tuple(found)[:_ORIGINS] for key, found in origins.items()},
        notes,
        sum(turn.refused for turn in turns),
    )


def try_session(
    name: str,
    requests: Sequence[Sequence[Message]],
    policies: Sequence[Policy],
    options: TrialOptions,
    *,
    limit: Limit | None = None,
    done: Callable[[], None] = lambda: None,
) -> SessionTrial:
    """Play the requests of one session to ``policies``, with each turn's states for the next.

    Args:
        name: the session's.
        limit: calls policies that aren't trusted; see `PolicySession.limit`.
        done: called after each turn.
    """
    memo, last, turns = Memo(), _Sent(), list[TurnTrial]()
    facts = PolicySession(window=options.window, memo=memo)
    if limit is not None:
        facts = replace(facts, limit=limit)
    for turn, messages in enumerate(requests):
        memo.next_turn()
        prepared = prepare(messages, policies, (), turn, session=facts)
        now = _sent(prepared, memo)
        turns.append(_turn(prepared, last, now, policies, options.anchor_tokens))
        facts = replace(facts, states=prepared.states, idle_s=options.idle_s, last=prepared)
        last = now
        done()
    return SessionTrial(name, tuple(turns))


@dataclass(frozen=True, slots=True)
class _Sent:
    """The part of a turn that is compared with the next one."""

    client: tuple[CachedMessage, ...] = ()
    """The client's messages, as if they had been sent unedited."""
    sent: tuple[CachedMessage, ...] = ()
    edits: Edits = frozenset()


def _sent(prepared: Prepared, memo: Memo) -> _Sent:
    def tokens(message: Message) -> int:
        return memo.get(message, _TOKENS, approximate_tokens)

    prints = prepared.client_fingerprints
    client = tuple(
        CachedMessage(value, tokens(message), value)
        for value, message in zip(prints, prepared.client, strict=True)
    )
    sent = tuple(
        CachedMessage(
            value,
            tokens(entry.message),
            None if entry.client_index is None else prints[entry.client_index],
        )
        for value, entry in zip(prepared.sent_fingerprints, prepared.sent, strict=True)
    )
    edits = {
        (_policy_of(change.cause), each.client or 0, each.sent)
        for entry, each in zip(prepared.sent, sent, strict=True)
        for change in entry.changes
    }
    edits |= {
        (_policy_of(item.change.cause), prints[item.client_index], 0) for item in prepared.dropped
    }
    return _Sent(client, sent, frozenset(edits))


def _turn(
    prepared: Prepared, last: _Sent, now: _Sent, policies: Sequence[Policy], anchor_tokens: int
) -> TurnTrial:
    said = promises(prepared)
    client_before = frozenset(message.sent for message in last.client)
    return TurnTrial(
        sum(message.tokens for message in now.client),
        sum(message.tokens for message in now.sent),
        Prefill(
            unedited=prefix_prefill(last.client, now.client),
            prefix=prefix_prefill(last.sent, now.sent),
            splice=splice_prefill(last.sent, client_before, now.sent, said, anchor_tokens),
        ),
        _by_policy(prepared, last, now, policies),
        prepared.faults,
        Counter(f"{note.policy}:{note.kind}" for note in prepared.notes),
        prepared.refused is not None,
    )


def _by_policy(
    prepared: Prepared, last: _Sent, now: _Sent, policies: Sequence[Policy]
) -> dict[str, PolicyFigures]:
    """Return figures by policy; tokens count for the one that edited a message last."""
    figures = {policy.name: PolicyFigures() for policy in policies}

    def count(change: Change, client: int | None, sent: int, reclaimed: int) -> None:
        name = _policy_of(change.cause)
        is_new = (name, client or 0, sent) not in last.edits
        known = figures.get(name, PolicyFigures())
        figures[name] = known + PolicyFigures(1, int(is_new), reclaimed)

    for entry, sent in zip(prepared.sent, now.sent, strict=True):
        at = entry.client_index
        before = now.client[at].tokens if at is not None else 0
        for place, change in enumerate(reversed(entry.changes)):
            count(change, sent.client, sent.sent, 0 if place else before - sent.tokens)
    for item in prepared.dropped:
        message = now.client[item.client_index]
        count(item.change, message.sent, 0, message.tokens)
    return figures


def _policy_of(cause: str) -> str:
    """Return the NAME of ``policy:NAME`` or ``policy:NAME:CAUSE``; any other cause unchanged."""
    parts = cause.split(":")
    return parts[1] if parts[0] == "policy" else cause


def _turn_json(turn: TurnTrial) -> dict[str, Any]:
    return {
        **_tokens_json(turn.original_tokens, turn.sent_tokens, turn.prefill),
        "policies": {
            name: asdict(each) for name, each in turn.policies.items() if each != PolicyFigures()
        },
        "faults": [f"{each.policy}:{each.fault}" for each in turn.faults],
        "notes": dict(turn.notes),
        "refused": turn.refused,
    }


def _tokens_json(original: int, sent: int, prefill: Prefill) -> dict[str, Any]:
    return {
        "original_tokens": original,
        "sent_tokens": sent,
        "reclaimed_tokens": original - sent,
        "prefill_tokens": asdict(prefill),
    }
