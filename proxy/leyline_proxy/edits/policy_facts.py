"""Facts of a session for its policies."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import compress, count
from operator import ne
from threading import Lock

from leyline_policies import EditCost, Memo, Policy, approximate_tokens
from leyline_policies.context import texts_of
from leyline_policies.faults import OnFault

from ..model.messages import Message
from ..model.prepared import Prepared
from ..model.session import Session
from ..render import ChatRenderer
from ..upstream.handshake import UpstreamStatus
from .edited import Sensitive
from .prepare import Limit, PolicySession

_FRAME_TOKENS = 4
"""Approximate tokens that a chat template puts around a message."""

_MAX_MEMOS = 256
"""Number of sessions whose per-message results are kept; others compute them again."""


_Kept = tuple[Sequence[Policy], ChatRenderer | None, Memo]


class PolicyMemos:
    """Per-message results of policies, by session; the least recently used go first.

    They are valid for one pipeline and one tokenizer: a session with others starts afresh.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, str], _Kept] = OrderedDict()
        self._lock = Lock()

    @contextmanager
    def of(
        self,
        tenant: str,
        session: str | None,
        policies: Sequence[Policy],
        renderer: ChatRenderer | None = None,
    ) -> Iterator[Memo]:
        """Yield the session's memo, for one turn at a time; a concurrent turn gets its own.

        The memo is lost if the turn fails, and isn't kept for a session without a name.
        """
        if session is None:
            yield Memo()
            return
        with self._lock:
            known = self._kept.pop((tenant, session), None)
        fits = known is not None and known[0] is policies and known[1] is renderer
        memo = known[2] if known is not None and fits else Memo()
        memo.next_turn()
        yield memo
        with self._lock:
            self._kept[tenant, session] = (policies, renderer, memo)
            while len(self._kept) > _MAX_MEMOS:
                self._kept.popitem(last=False)


def policy_session(
    session: Session | None,
    status: UpstreamStatus,
    model: str,
    *,
    cost: EditCost,
    memo: Memo,
    limit: Limit,
    sensitive: Sensitive | None,
    on_fault: OnFault,
    now: float,
) -> PolicySession:
    """Return the facts of a session for its policies.

    Args:
        session: None for a new one.
        model: the name in the request.
        now: seconds since the epoch.
    """
    served = status.capability if _serves(status, model) else None
    last = session.last if session is not None else None
    return PolicySession(
        window=served.max_context if served is not None else None,
        idle_s=max(0.0, now - session.updated) if session is not None and session.answered else 0.0,
        elapsed_s=max(0.0, now - session.created) if session is not None else 0.0,
        model=model,
        cost=cost,
        states=session.policy_states if session is not None else {},
        completions=session.completions if session is not None else {},
        memo=memo,
        count=token_counter(renderer_of(status, model)),
        limit=limit,
        sensitive=sensitive,
        on_fault=on_fault,
        last=last.prepared if last is not None else None,
    )


def _serves(status: UpstreamStatus, model: str) -> bool:
    """Return True if the known facts of the engine's model apply to ``model``."""
    return status.capability is not None and status.capability.is_of(model)


def renderer_of(status: UpstreamStatus, model: str) -> ChatRenderer | None:
    """Return the model's own tokenizer and template, if available."""
    return status.rendering.renderer if _serves(status, model) else None


def known_objects(
    messages: Sequence[Message], fingerprints: Sequence[int], last: Prepared | None
) -> tuple[Message, ...]:
    """Return ``messages`` with each one from the last turn's list as that very object.

    Results computed for a message are then found by its identity.
    """
    if last is None:
        return tuple(messages)
    # Equal fingerprints don't imply equal markers or equal forms of texts, which are sent as they
    # are; so messages are compared. Most are at their old places.
    prints = last.client_fingerprints
    moved = {*compress(count(), map(ne, last.client, messages))}
    if prints != (*fingerprints[: len(prints)],):
        moved.update(compress(count(), map(ne, prints, fingerprints)))
    found = [*last.client[: len(messages)], *messages[len(prints) :]]
    places = (*moved, *range(len(prints), len(messages)))
    elsewhere = not {fingerprints[place] for place in places}.isdisjoint(prints)
    by_print = dict(zip(prints, last.client, strict=True)) if elsewhere else {}
    for place in places:
        known, message = by_print.get(fingerprints[place]), messages[place]
        found[place] = known if known is not None and known == message else message
    return tuple(found)


def token_counter(renderer: ChatRenderer | None) -> Callable[[Message], int]:
    """Return a function that counts a message's tokens, if possible with the model's tokenizer."""
    if renderer is None:
        return approximate_tokens

    def count(message: Message) -> int:
        return _FRAME_TOKENS + sum(len(renderer.encode(text)) for text in texts_of(message) if text)

    return count
