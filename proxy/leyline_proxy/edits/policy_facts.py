"""Facts of a session for its policies."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import compress, count
from operator import ne
from threading import Lock
from typing import NamedTuple
from weakref import ref

from leyline_policies import EditCost, Memo, Policy, approximate_tokens
from leyline_policies.context import picture_tokens, texts_of
from leyline_policies.faults import OnFault

from ..model.messages import Message
from ..model.prepared import Prepared
from ..model.session import Session
from ..model.text_memory import Left, Owner, Reader, left_of
from ..render import ChatRenderer
from ..request.parse import ChatRequest
from ..upstream.handshake import UpstreamStatus
from .edited import Sensitive
from .prepare import Limit, PolicySession

_FRAME_TOKENS = 4
"""Approximate tokens that a chat template puts around a message."""

_MAX_MEMOS = 256
"""Number of sessions whose per-message results are kept; others compute them again."""


class _Kept(NamedTuple):
    policies: Sequence[Policy]
    renderer: ref[ChatRenderer] | None
    """Held weakly: it remembers texts of others, and may have been replaced."""
    memo: Memo
    demands: int

    def fits(self, policies: Sequence[Policy], renderer: ChatRenderer | None) -> bool:
        own = self.renderer() if self.renderer is not None else None
        return self.policies is policies and own is renderer


class PolicyMemos:
    """Per-message results of policies, by session; the least recently used go first.

    They are valid for one pipeline and one tokenizer: a session with others starts afresh.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[Owner, _Kept] = OrderedDict()
        self._lent: dict[Owner, Memo] = {}
        """Memos in use, by session; without one that a forget reached."""
        self._lock = Lock()

    @contextmanager
    def of(
        self, reader: Reader, policies: Sequence[Policy], renderer: ChatRenderer | None = None
    ) -> Iterator[Memo]:
        """Yield the session's memo, for one turn at a time; a concurrent turn gets its own.

        The memo is lost if the turn fails or is overtaken by a forget, and isn't kept for a session
        without a name.
        """
        owner = reader.owner
        if not reader.session:
            yield Memo()
            return
        with self._lock:
            known = self._kept.pop(owner, None)
            memo = known.memo if known is not None and known.fits(policies, renderer) else Memo()
            self._lent[owner] = memo
        memo.next_turn()
        try:
            yield memo
        except BaseException:
            with self._lock:
                if self._lent.get(owner) is memo:
                    del self._lent[owner]
            raise
        held = ref(renderer) if renderer is not None else None
        with self._lock:
            if self._lent.get(owner) is not memo:
                return
            del self._lent[owner]
            self._kept[owner] = _Kept(policies, held, memo, reader.demands)
            while len(self._kept) > _MAX_MEMOS:
                self._kept.popitem(last=False)

    def forget(self, tenant: str, session: str, demands: int | None) -> None:
        """Drop a session's memo.

        Args:
            demands: only one of a turn up to these demands; None for any.
        """
        with self._lock:
            self._lent.pop((tenant, session), None)
            known = self._kept.get((tenant, session))
            if known is not None and (demands is None or known.demands <= demands):
                del self._kept[tenant, session]

    def left(self, tenant: str, session: str, demands: int) -> Left:
        """Return the number of a session's memos."""
        with self._lock:
            known = self._kept.get((tenant, session))
        return left_of([known.demands] if known is not None else [], demands)


def policy_session(
    session: Session | None,
    status: UpstreamStatus,
    request: ChatRequest,
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
        now: seconds since the epoch.
    """
    model = request.model
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
        count=token_counter(reading_renderer(status, request)),
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


def reading_renderer(status: UpstreamStatus, request: ChatRequest) -> ChatRenderer | None:
    """Return :func:`renderer_of` for a request, whose session's the rendered texts are."""
    renderer = renderer_of(status, request.model)
    return renderer.read_by(request.reader) if renderer is not None else None


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
    """Return a function that counts a message's tokens, if possible with the model's tokenizer;
    those of pictures are an estimate."""
    if renderer is None:
        return approximate_tokens

    def count(message: Message) -> int:
        words = sum(len(renderer.encode(text)) for text in texts_of(message) if text)
        return _FRAME_TOKENS + words + picture_tokens(message)

    return count
