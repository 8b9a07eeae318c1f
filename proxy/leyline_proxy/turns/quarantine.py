"""Quarantine of a session's messages on demand: at once in the engines, and on every later turn."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from leyline_engine.contract import output_span
from leyline_policies.verbs import VERDICT, Verbs

from ..errors import BadRequestError, SessionStoreGoneError
from ..model.derived import Derived, derived_from
from ..model.history import FRAME
from ..model.places import owed
from ..model.session import RetainedTurn, Session
from ..model.spans import turn_index
from ..model.verdicts import MAX_VERDICTS, Verdict, demanded, keyed_print, with_verdicts
from ..request.side_bodies import QuarantineBody
from .forgets import SessionForgets
from .placing import Placing
from .ports import QuarantineLog

_PATIENCE_S = 5.0
"""Seconds that an answer waits for the engines."""


@dataclass(frozen=True, slots=True)
class _Target:
    """A message as a caller names it."""

    verdict: Verdict
    names: tuple[str, ...]
    """Every name that it has or may have had."""
    first: int
    """Number of the turn that brought it; 0 if unknown."""


class Quarantines:
    """Puts messages of sessions into quarantine.

    Args:
        key: keys the hashes by which messages are known again.
    """

    def __init__(self, forgets: SessionForgets, *, audit: QuarantineLog, key: bytes) -> None:
        self._forgets = forgets
        self._audit = audit
        self._key = key

    async def put(self, tenant: str, session_id: str, body: QuarantineBody) -> dict[str, Any]:
        """Put messages into quarantine, and return the account for the caller.

        Raises:
            NotFoundError: the tenant has no such session.
            BadRequestError: a message that the session doesn't know, or may not lose.
            SessionStoreGoneError: the verdict could not be kept.
            ForgetsOwedError: too many forgets of the tenant wait already.
        """
        forgets, erasures = self._forgets, self._forgets.erasures
        session = await forgets.session(tenant, session_id)
        targets = list(_targets(session, body, self._key))
        verdicts = [each.verdict for each in targets]
        _check_room(session, verdicts)
        erasures.check(tenant)
        before, after = await forgets.change(
            tenant, session_id, lambda now: condemned(now, verdicts, forgets.placing)
        )
        await self._check_kept(tenant, session_id, verdicts)
        # First of all: what a stop cuts off below must not take the debt along.
        erasures.start(after)
        await erasures.saved()
        forgets.named.drop(tenant, session_id)
        await forgets.remove_texts(before, after, {each.verdict.span for each in targets})
        derived = _derived(after, targets, under_way=bool(session.in_flight))
        new = set(after.verdicts) - set(before.verdicts)
        self._record(after, [v for v in verdicts if v.span in {n.span for n in new}], body, derived)
        first = min(each.first for each in targets)
        deleted = 0
        if body.responses:
            deleted = await forgets.responses.delete_from(tenant, session_id, first)
            forgets.check_store()
        await erasures.carried(tenant, session_id, _PATIENCE_S)
        now = await forgets.store.get(tenant, session_id) or after
        return {
            "session": session_id,
            "quarantined": [
                {"span": each.verdict.span, "message": each.verdict.message} for each in targets
            ],
            "forgot": _forgot(now, first),
            **derived.account(),
            "responses_deleted": deleted,
        }

    def _record(
        self, after: Session, verdicts: list[Verdict], body: QuarantineBody, derived: Derived
    ) -> None:
        waiting, told = tuple(owed(after.places)), [derived]
        for verdict in verdicts:
            self._audit.quarantined(
                after.tenant,
                after.id,
                verdict,
                reason=body.reason,
                owed=waiting,
                derived=told.pop() if told else None,
            )

    async def _check_kept(self, tenant: str, session_id: str, verdicts: list[Verdict]) -> None:
        """Check that the store has the verdicts: others may have written all the time."""
        found = await self._forgets.store.get(tenant, session_id)
        kept = {name for each in found.verdicts for name in each.spans} if found else set()
        self._forgets.check_store()
        if not kept.issuperset(v.span for v in verdicts):
            raise SessionStoreGoneError


def condemned(session: Session, verdicts: list[Verdict], placing: Placing) -> Session:
    """Return the session with verdicts, and with a forget of everything owed by its engines; the
    very session if it has them all already."""
    known = with_verdicts(session.verdicts, verdicts)
    if known == session.verdicts:
        return session
    return replace(
        placing.forgotten(session),
        verdicts=known,
        readings=session.readings.forget({each.span for each in verdicts}),
    )


def _check_room(session: Session, verdicts: list[Verdict]) -> None:
    known = {name for each in session.verdicts for name in each.spans}
    new = [each for each in verdicts if each.span not in known]
    if new and demanded(session.verdicts) + len(new) > MAX_VERDICTS:
        raise BadRequestError(
            f"A session remembers {MAX_VERDICTS} messages in quarantine. Leave their text out of "
            "the messages instead.",
            param="messages",
            code="quarantine_limit",
        )


def _forgot(session: Session, first: int) -> dict[str, Any]:
    waiting = len(owed(session.places))
    if session.untraced > first:
        return {"result": "unreachable", "owed": waiting}
    return {"result": "owed" if waiting else "erased", "owed": waiting}


def _derived(session: Session, targets: list[_Target], *, under_way: bool) -> Derived:
    """Return the texts of a session that are derived from messages in quarantine.

    Args:
        under_way: True if a turn may be writing another one.
    """
    forgotten = {name for each in targets for name in each.names}
    first = min(each.first for each in targets)
    return derived_from(
        session.readings,
        forgotten,
        session.last.names if session.last is not None else None,
        also={name for each in session.verdicts for name in each.spans},
        # A text that was recalled has been read under another name, too.
        certain=not (under_way or session.in_flight or session.recalled)
        and session.untraced <= first,
    )


def _targets(session: Session, body: QuarantineBody, key: bytes) -> Iterator[_Target]:
    last = session.last
    count = len(last.prepared.client) if last is not None else 0
    for number, index in enumerate(body.messages):
        if last is None or index >= count:
            had = f"messages 0 to {count - 1}" if count else "no messages that are known here"
            raise BadRequestError(
                f"messages[{number}] is {index}, but the session's newest list has {had}.",
                param=f"messages[{number}]",
            )
        yield _in_turn(last, index, key, f"messages[{number}]", newest=True)
    known = _Names(session) if body.spans else None
    for number, span in enumerate(body.spans):
        if known is not None:
            yield known.target(span, key, f"spans[{number}]")


def _in_turn(turn: RetainedTurn, place: int, key: bytes, param: str, *, newest: bool) -> _Target:
    name, role = turn.names.client[place], str(turn.prepared.client[place].get("role", ""))
    if role in FRAME:
        raise BadRequestError(f"{param}: instructions can't be put into quarantine.", param=param)
    prints = (keyed_print(turn.prepared.client_fingerprints[place], key),)
    first = min((turn_index(each) or 0 for each in name.all), default=0)
    return _Target(_verdict(name.id, prints, place if newest else None, role), name.all, first)


class _Names:
    """Finds the message of a name, wherever a session knows it."""

    def __init__(self, session: Session) -> None:
        self._turns = session.turns[::-1]
        self._last = session.last
        self._departed: dict[str, list[int]] = defaultdict(list)
        for value, names in session.departed.messages.items():
            for name in names:
                self._departed[name].append(value)
        answers = (output_span(turn.turn) for turn in session.turns if turn.output_ids)
        self._answers = {*answers, *session.departed.outputs}
        self._texts = {text.name: text for text in reversed(session.readings.texts)}

    def target(self, span: str, key: bytes, param: str) -> _Target:
        """Return the message. Raises BadRequestError for an unknown name."""
        for turn in self._turns:
            place = turn.names.index.get(span)
            if place is not None:
                return _in_turn(turn, place, key, param, newest=turn is self._last)
        values, text = self._departed.get(span, []), self._texts.get(span)
        if not values and text is None and span not in self._answers:
            raise BadRequestError(
                f"{param} names no message of this session; its ledger lists the names.",
                param=param,
            )
        prints = tuple(keyed_print(value, key) for value in values)
        role = "" if values else text.role if text is not None else "assistant"
        return _Target(_verdict(span, prints, None, role), (span,), turn_index(span) or 0)


def _verdict(span: str, prints: tuple[int, ...], message: int | None, role: str) -> Verdict:
    # Its edit is the same as that of the caller's own annotation.
    return Verdict((span,), prints, Verbs.name, VERDICT, "api", message=message, role=role)
