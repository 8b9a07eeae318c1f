"""A request's annotations of single messages, in their member ``leyline``; see
`leyline_policies.verbs`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec

from leyline_engine.contract import MAX_TTL_S, ClaimKind
from leyline_engine.contract.claim import MAX_PRIORITY
from leyline_policies.conversation import INSTRUCTION_ROLES, nth_last
from leyline_policies.verbs import ANNOTATION, QUARANTINE, VERDICT, leaves_stub

from ..model.fields import OptionError, ShareName, field_error
from ..model.messages import Message

_SHOWN = 8
"""Most scopes that an error names."""

_Tag = Annotated[str, msgspec.Meta(max_length=64)]


class Decay(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The time after which a message is removed."""

    turns: Annotated[int, msgspec.Meta(ge=1)] | None = None
    seconds: Annotated[float, msgspec.Meta(gt=0)] | None = None


class Pin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The terms that keep a pinned message's KV resident."""

    kind: ClaimKind = ClaimKind.SOFT
    priority: Annotated[int, msgspec.Meta(ge=0, le=MAX_PRIORITY)] = 50
    ttl_s: Annotated[int, msgspec.Meta(ge=1, le=MAX_TTL_S)] = 3600
    """Seconds; renewed while the message is pinned."""


class Annotation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The member ``leyline`` of a message."""

    evict: bool = False
    forget: bool = False
    decay: Decay | None = None
    scratch: bool = False
    pin: bool | Pin = False
    share: ShareName = ""
    tags: Annotated[tuple[_Tag, ...], msgspec.Meta(max_length=16)] = ()
    verdict: Literal["quarantine", "allow"] | None = None

    @property
    def pinned(self) -> Pin | None:
        """The terms of the message's pin; None if it isn't pinned."""
        if isinstance(self.pin, Pin):
            return self.pin
        return Pin() if self.pin else None


def annotations_of(messages: Sequence[Message]) -> dict[int, Annotation]:
    """Return the annotations of a message list, by index.

    Raises:
        OptionError: names the field and its allowed values.
    """
    return {
        index: _annotation(f"messages[{index}].{ANNOTATION}", message[ANNOTATION])
        for index, message in enumerate(messages)
        if ANNOTATION in message
    }


def said_by_both(first: object, second: object) -> object:
    """Combine two ``leyline`` members of one message: the second, plus a forget and a quarantine of
    either.

    A demand is never left out. An unreadable member passes and is refused by its own check.
    """
    if not isinstance(first, dict):
        return first
    if not isinstance(second, dict):
        return second
    demands = {"forget": first["forget"]} if first.get("forget") else {}
    if first.get(VERDICT) == QUARANTINE:
        demands[VERDICT] = QUARANTINE
    return {**second, **demands}


def check_forgets(messages: Sequence[Message], annotations: Mapping[int, Annotation]) -> None:
    """Refuse a forget or a quarantine that can't be carried out: a caller relies on every accepted
    one.

    Raises:
        OptionError: names the message.
    """
    for index, said in annotations.items():
        if said.verdict == QUARANTINE and messages[index].get("role") in INSTRUCTION_ROLES:
            where = f"messages[{index}].{ANNOTATION}.{VERDICT}"
            raise OptionError(where, f"{where}: instructions can't be put into quarantine.")
    last_user = nth_last(messages, "user", 1)
    forgotten = [index for index, said in annotations.items() if said.forget]
    if last_user is not None and last_user in forgotten:
        raise _unfit_forget(
            last_user, "the user's last message can't be forgotten, because the model answers it"
        )
    goes = [said for said in annotations.values() if said.forget or (said.evict and not said.pin)]
    if forgotten and len(goes) == len(messages) and not any(map(leaves_stub, messages)):
        raise _unfit_forget(forgotten[0], "no message would be left to send")


def _unfit_forget(index: int, why: str) -> OptionError:
    where = f"messages[{index}].{ANNOTATION}.forget"
    return OptionError(where, f"{where}: {why}. Leave its text out, or forget it on a later turn.")


def pin_terms(said: Mapping[str, Any]) -> Pin | None:
    """Return the terms of a pin as a policy gives them; None if they aren't valid."""
    try:
        return msgspec.convert(said, Pin)
    except msgspec.ValidationError:
        return None


def shared_scope(annotations: Mapping[int, Annotation]) -> str | None:
    """Return the scope that the messages name; None if none does.

    Raises:
        OptionError: they name several.
    """
    scopes = sorted({each.share for each in annotations.values() if each.share})
    if len(scopes) > 1:
        named = f"{', '.join(scopes[:_SHOWN])}{', …' if len(scopes) > _SHOWN else ''}"
        raise OptionError("messages", f"messages name several scopes to share with: {named}.")
    return scopes[0] if scopes else None


def _annotation(where: str, raw: object) -> Annotation:
    try:
        found = msgspec.convert(raw, Annotation)
    except msgspec.ValidationError as error:
        raise field_error(where, str(error), _fields_named(str(error)), raw) from error
    if found.decay is not None and found.decay == Decay():
        raise OptionError(f"{where}.decay", f"{where}.decay needs turns or seconds.")
    return found


def _fields_named(text: str) -> tuple[str, ...]:
    """Return the members of the object that a converter complains about."""
    inner: dict[str, type[msgspec.Struct]] = {".decay": Decay, ".pin": Pin}
    found = next((kind for path, kind in inner.items() if f"`${path}" in text), Annotation)
    return found.__struct_fields__
