"""What a request says of single messages, in their member ``leyline``; see
`leyline_policies.verbs`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import msgspec

from leyline_policies.verbs import ANNOTATION

from .messages import Message
from .options import OptionError, ShareName, field_error

_Tag = Annotated[str, msgspec.Meta(max_length=64)]


class Decay(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """After how long a message goes."""

    turns: Annotated[int, msgspec.Meta(ge=1)] | None = None
    seconds: Annotated[float, msgspec.Meta(gt=0)] | None = None


class Annotation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The member ``leyline`` of a message."""

    evict: bool = False
    forget: bool = False
    decay: Decay | None = None
    scratch: bool = False
    pin: bool = False
    share: ShareName = ""
    tags: Annotated[tuple[_Tag, ...], msgspec.Meta(max_length=16)] = ()
    verdict: Literal["quarantine", "allow"] | None = None


def annotations_of(messages: Sequence[Message]) -> dict[int, Annotation]:
    """The annotations of a message list, by index.

    Raises:
        OptionError: names the field and what it may be.
    """
    return {
        index: _annotation(f"messages[{index}].{ANNOTATION}", message[ANNOTATION])
        for index, message in enumerate(messages)
        if ANNOTATION in message
    }


def shared_scope(annotations: Mapping[int, Annotation]) -> str | None:
    """The scope that the messages name; None where none does.

    Raises:
        OptionError: they name several.
    """
    scopes = sorted({each.share for each in annotations.values() if each.share})
    if len(scopes) > 1:
        raise OptionError(
            "messages", f"messages name several scopes to share with: {', '.join(scopes)}."
        )
    return scopes[0] if scopes else None


def _annotation(where: str, raw: object) -> Annotation:
    try:
        found = msgspec.convert(raw, Annotation)
    except msgspec.ValidationError as error:
        known = Decay if ".decay" in str(error) else Annotation
        raise field_error(where, str(error), known.__struct_fields__) from error
    if found.decay is not None and found.decay == Decay():
        raise OptionError(f"{where}.decay", f"{where}.decay needs turns or seconds.")
    return found
