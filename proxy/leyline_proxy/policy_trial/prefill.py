"""How many tokens a turn has to prefill, worked out from token counts alone.

The cache holds what was sent on the turn before; answers count as new where they come back.

- A *prefix cache* keeps the messages up to the first one that differs.
- A *splicing* one keeps every message that is sent again, in order. What policies changed in
  amortize mode is computed anew, and nothing else; behind a forget, and behind a change that the
  client made itself, all is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from leyline_engine.contract import Mode

from ..model.diff import common_subsequence
from ..model.prepared import Prepared


@dataclass(frozen=True, slots=True)
class CachedMessage:
    """One message as it was sent: its fingerprint, its tokens, the client's fingerprint of it."""

    sent: int
    tokens: int
    client: int | None
    """None for one that a policy put in."""


@dataclass(frozen=True, slots=True)
class Promises:
    """What a turn says of the client's messages, by their fingerprints."""

    client: frozenset[int]
    """Those that the client sent."""
    forgotten: frozenset[int]
    """Those of which an edit in mode forget took something away."""


def promises(prepared: Prepared) -> Promises:
    """What a turn says of the client's messages."""
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
    """Tokens to prefill with a prefix cache."""
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
) -> int:
    """Tokens to prefill with a cache that is spliced.

    Args:
        before: what was sent on the turn before.
        client_before: fingerprints of what the client sent then.
        said: of this turn.
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
        old_at, new_at = old + 1, new + 1
    return prefilled


def _is_exact(gone: CachedMessage, said: Promises) -> bool:
    """Whether nothing behind a message that isn't sent any more may be kept."""
    return gone.client is not None and (
        gone.client not in said.client or gone.client in said.forgotten
    )


def _is_clients(came: CachedMessage, client_before: frozenset[int]) -> bool:
    """Whether the client itself put a message in."""
    return came.client is not None and came.client not in client_before
