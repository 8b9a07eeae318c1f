"""The number of tokens that a turn must prefill, from token counts alone.

The cache holds the messages of the turn before; answers count as new when they come back.

- A *prefix cache* keeps the messages up to the first one that differs.
- A *splicing* one keeps every message that is sent again, in order. It computes again only the
  messages that policies changed in amortize mode; after a forget, and after a change by the client
  itself, it computes everything again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from leyline_engine.contract import Mode
from leyline_proxy.model.diff import common_subsequence
from leyline_proxy.model.prepared import Prepared


@dataclass(frozen=True, slots=True)
class CachedMessage:
    """One sent message: its fingerprint, its tokens, and the client's fingerprint of it."""

    sent: int
    tokens: int
    client: int | None
    """None for a message that a policy inserted."""


@dataclass(frozen=True, slots=True)
class Promises:
    """A turn's facts about the client's messages, by their fingerprints."""

    client: frozenset[int]
    """Messages that the client sent."""
    forgotten: frozenset[int]
    """Messages from which an edit in mode forget removed something."""


def promises(prepared: Prepared) -> Promises:
    """Return a turn's facts about the client's messages."""
    prints = prepared.client_fingerprints
    forgotten = {
        prints[entry.client_index]
        for entry in prepared.sent
        if entry.client_index is not None
        and any(change.mode is Mode.FORGET for change in entry.changes)
    }
    forgotten |= {
        prints[item.client_index] for item in prepared.dropped if item.change.mode is Mode.FORGET
    }
    return Promises(frozenset(prints), frozenset(forgotten))


def prefix_prefill(before: Sequence[CachedMessage], now: Sequence[CachedMessage]) -> int:
    """Return the tokens to prefill with a prefix cache."""
    kept = 0
    for old, new in zip(before, now, strict=False):
        if old.sent != new.sent:
            break
        kept += 1
    return sum(message.tokens for message in now[kept:])


def splice_prefill(
    before: Sequence[CachedMessage],
    client_before: frozenset[int],
    now: Sequence[CachedMessage],
    said: Promises,
    anchor_tokens: int = 1,
) -> int:
    """Return the tokens to prefill with a splicing cache.

    Args:
        before: messages sent on the turn before.
        client_before: fingerprints of the client's messages then.
        said: facts of this turn.
        anchor_tokens: tokens between two anchors of a model with recurrent layers. Half of them, on
            average, are computed again on either side of new text; never more than with a prefix
            cache.
    """
    kept = common_subsequence([each.sent for each in before], [each.sent for each in now])
    prefilled = old_at = new_at = 0
    exact = False
    for old, new in [*kept, (len(before), len(now))]:
        gone, came = before[old_at:old], now[new_at:new]
        prefilled += sum(message.tokens for message in came)
        exact = exact or any(_is_exact(message, said) for message in gone)
        exact = exact or any(_is_clients(message, client_before) for message in came)
        if new < len(now) and exact:
            prefilled += now[new].tokens
        elif new < len(now) and came:
            prefilled += anchor_tokens - 1
        old_at, new_at = old + 1, new + 1
    return prefilled if anchor_tokens == 1 else min(prefilled, prefix_prefill(before, now))


def _is_exact(gone: CachedMessage, said: Promises) -> bool:
    """Return True if nothing after a message that is no longer sent may be kept."""
    return gone.client is not None and (
        gone.client not in said.client or gone.client in said.forgotten
    )


def _is_clients(came: CachedMessage, client_before: frozenset[int]) -> bool:
    """Return True if the client itself inserted a message."""
    return came.client is not None and came.client not in client_before
