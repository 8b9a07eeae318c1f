"""Promises of marks that last when policies follow one another as one."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from leyline_policies.alignment import align, rejoin
from leyline_policies.marks import MarkedMessage, drop, mark_of, marks_since, remark
from leyline_policies.policy import Message, Mode
from leyline_policies.verbs import is_forgotten


def still_forgotten(
    before: Sequence[Message], after: list[Message], given: Collection[int]
) -> list[Message]:
    """Return ``after`` with the mark forget on messages that have it in ``before``.

    Args:
        given: identities of the messages that the policies together got; marks that others made
            before that aren't theirs.
    """
    owed = [i for i, message in enumerate(before) if forgets(message, given)]
    if not owed:
        return after
    became = dict(align(before, after))
    result: list[Message] = list(after)
    gone: list[Message] = []
    for index in owed:
        place = became.get(index)
        if place is None:
            gone.append(drop(before[index], mode="forget"))
        elif _promised(after[place]) != "forget":
            result[place] = remark(after[place], before[index], "forget")
    if not gone:
        return result
    lost = {id(grave.origin): grave for grave in gone if isinstance(grave, MarkedMessage)}
    whole = [lost.get(id(message), message) for message in before]
    live = [message for message in whole if id(message) not in set(map(id, gone))]
    return rejoin(whole, live, result)


def strictest(given: Sequence[Message], after: list[Message]) -> list[Message]:
    """Return ``after`` so that no edit of an edit takes back the first one's promise."""
    known = set(map(id, given))
    if all(_promised(message) != "amortize" for message in after):
        return after
    return [
        remark(message, message.origin, None)
        if isinstance(message, MarkedMessage)
        and message.mark.mode == "amortize"
        and id(message.origin) not in known
        else message
        for message in after
    ]


def _promised(message: Message) -> Mode | None:
    mark = mark_of(message)
    return None if mark is None else mark.mode


def forgets(message: Message, given: Collection[int]) -> bool:
    """Return True if ``message``, or an edit that led to it, is marked as forgotten.

    Args:
        given: identities of the given messages.
    """
    return is_forgotten(message) or any(
        mark.mode == "forget" for mark in marks_since(message, given)
    )
