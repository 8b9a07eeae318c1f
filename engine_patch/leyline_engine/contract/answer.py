"""The record of a turn in the turn's own answer, which saves a request on the side channel.

An envelope's action asks for it, so that only a proxy that will remove it gets it. It is the last
member of the answer's JSON object: of the body, or in a stream of the first chunk with a finish
reason. An engine that has no record by then leaves it out.
"""

from __future__ import annotations

import msgspec

from .capability import RECEIPT_IN_ANSWER, Capability
from .receipt import TurnRecord
from .vocabulary import ACTION_VERSION, PROTOCOL_VERSION, RECEIPT_ACTION

RECORD_MEMBER = "leyline_record"
"""Name of the member; its value is a :class:`~.receipt.TurnRecord`."""

_SPACE = b" \t\n\r"


def with_receipts_in_answers(capability: Capability) -> Capability:
    """Return the capability of an engine whose answers bring their records."""
    if RECEIPT_IN_ANSWER in capability.actions:
        return capability
    actions = (*capability.actions, RECEIPT_IN_ANSWER)
    return msgspec.structs.replace(capability, actions=actions)


def message_that_asks(raw: object) -> str | None:
    """Return the message id of an envelope that asks for its record; None for all others.

    Args:
        raw: JSON-shaped data, which may be malformed elsewhere: its record reports that.
    """
    match raw:
        case {
            "protocol_version": str(version),
            "message_id": str(message_id),
            "actions": [*actions],
        } if version == PROTOCOL_VERSION and any(map(_asks, actions)):
            return message_id
        case _:
            return None


def with_record(answer: bytes, record: TurnRecord) -> bytes:
    """Return a JSON object with the record as its last member, all other bytes unchanged.

    Raises:
        ValueError: not a JSON object, judging by its ends.
    """
    end = len(answer.rstrip(_SPACE)) - 1
    if end < 1 or answer[end : end + 1] != b"}":
        raise ValueError("an answer is a JSON object")
    start = len(answer[:end].rstrip(_SPACE))
    comma = b"" if answer[start - 1 : start] == b"{" else b","
    member = b'%b"%b":%b' % (comma, RECORD_MEMBER.encode(), msgspec.json.encode(record))
    return b"".join((answer[:start], member, answer[start:]))


def _asks(action: object) -> bool:
    match action:
        case {"action_type": str(kind), "action_version": str(version)}:
            return (kind, version) == (RECEIPT_ACTION, ACTION_VERSION)
        case _:
            return False
