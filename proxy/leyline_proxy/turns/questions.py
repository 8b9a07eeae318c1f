"""Questions of policies about the conversation that a turn has just sent. Pure.

::

    turn       ─ system ─ history ─ user ────────┤ answer, for the client
    question   ─ system ─ history ─ user ─ task ─┤ answer, for the policy

The question is a turn of the session: its list is the one that was sent, and one message more. So
the engine has all but that message in its cache, and retains the answer as a source of later turns.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from leyline_engine.contract import Mode
from leyline_policies.builtin.notes import with_note
from leyline_policies.context import Completion
from leyline_policies.conversation import BEARERS

from ..model.clock import TurnClock
from ..model.messages import fingerprint, text_of
from ..model.prepared import POLICY, Change, Fingerprinted, Prepared, SentMessage
from ..model.session import Session
from ..plan.planning import Planned
from ..request.compaction import question_body
from ..request.parse import ChatRequest
from .turn import Turn

_MARGIN = 64
"""Tokens of the window that stay free beside a question's answer."""


class SessionMovedError(Exception):
    """The engine has forgotten the session since the turn, or is about to."""


def check_place(session: Session, run: str, *, settled: Session) -> None:
    """Raise SessionMovedError if the messages of a turn may no longer be sent to its engine.

    Args:
        session: its state now.
        run: of the engine.
        settled: the session's state when the turn ended.
    """
    # A demand since may have been for something in the turn's messages.
    if not is_same(session, settled):
        raise SessionMovedError
    check_run(session, run)


def is_same(session: Session, before: Session) -> bool:
    """Return True if nothing was to be forgotten of a session since, and it hasn't begun again."""
    return (session.demands, session.created) == (before.demands, before.created)


def check_run(session: Session, run: str) -> None:
    """Raise SessionMovedError if an engine has been made to forget a session, or is to be."""
    place = session.places.get(run)
    if run and (place is None or place.owed):
        raise SessionMovedError


def question_list(turn: Turn, wanted: Completion, *, joined: bool = False) -> Prepared:
    """Return the list that a turn has sent, and a policy's question after it.

    Args:
        joined: True to put the question at the end of the last message, for a chat template that
            refuses another message of the user.
    """
    before, prints = turn.planned.prepared, turn.planned.prepared.sent_fingerprints
    change = Change(f"{POLICY}:{wanted.policy}", Mode.AMORTIZE)
    if joined:
        last = before.sent[-1]
        text = "\n\n".join(map(text_of, wanted.messages))
        message = dict(with_note(last.message, text, cause="question"))
        asked = SentMessage(message, last.client_index, (*last.changes, change), last.moved_from)
        sent, prints = (*before.sent[:-1], asked), (*prints[:-1], fingerprint(message))
    else:
        more = (SentMessage(message, None, (change,)) for message in wanted.messages)
        sent, prints = (*before.sent, *more), (*prints, *map(fingerprint, wanted.messages))
    return Prepared(
        before.client,
        sent,
        before.dropped,
        forget_marks=before.forget_marks,
        scope=before.scope,
        quarantined=before.quarantined,
        recalls=before.recalls,
        known_fingerprints=(
            Fingerprinted(before.client, before.client_fingerprints),
            Fingerprinted(sent, prints),
        ),
    )


def refuses(turn: Turn, planned: Planned) -> bool:
    """Return True if the chat template took a turn's list and refuses a question after it."""
    taken = turn.planned.rendered is not None and turn.status.rendering.proven
    last = turn.planned.prepared.messages[-1].get("role")
    return taken and planned.rendered is None and last in BEARERS


def question_request(turn: Turn, wanted: Completion) -> ChatRequest:
    """Return the request that a policy's question is sent as, with the client's own messages."""
    request, limit = turn.request, _room(turn, wanted)
    body = question_body(request.body, request.body["messages"], max_tokens=limit)
    return replace(
        request,
        raw=msgspec.json.encode(body),
        body=body,
        requested=(),
        annotations={},
        stream=False,
        clock=TurnClock(),
        offers_recall=False,
        compaction=None,
        compacted=None,
    )


def _room(turn: Turn, wanted: Completion) -> int:
    """Return the largest number of tokens of an answer that the model's window has room for."""
    capability, rendered = turn.status.capability, turn.planned.rendered
    if capability is None or rendered is None:
        return wanted.max_tokens
    asked = sum(len(str(message.get("content"))) for message in wanted.messages)
    left = capability.max_context - len(rendered.tokens) - asked - _MARGIN
    return max(1, min(wanted.max_tokens, left))
