"""JSON of a client, decoded only if it has few enough values.

Decoding isn't interrupted, and a byte of JSON can become 80 bytes of objects. So values are counted
in the bytes, in pieces, and a body with too many is refused undecoded.
"""

from __future__ import annotations

import math
import re
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import msgspec

from ..errors import BadRequestError
from ..model.messages import Message

MAX_VALUES = 200_000
"""Values of one body: as many take less than 50 ms to decode, whatever they are."""

_PIECE = 1 << 18
"""Bytes that are counted at a time: some milliseconds."""
_COUNTED = b'[{",0123456789'
"""Bytes of which a value has at least one."""
_DIGITS = b"0123456789"
_SHORT_NUMBERS = re.compile(rb"(?<![0-9.eE+-])[0-9]{1,10}[ \t\n\r]*,")
_SHORT_PER_VALUE = 6
_DIGITS_PER_VALUE = 2


def check_values(raw: bytes, limit: int) -> Generator[None, None, None]:
    """Refuse JSON with more than ``limit`` values. Yields between pieces of the work, so that its
    caller can let others run.

    A list, an object, a text, a member's name and a comma count as one each, as do two digits of a
    number. Of numbers of up to 10 digits in a list, such as token ids, six count as one.

    Raises:
        BadRequestError: it has more.
    """
    # Nearly all pass this cheap bound, which takes what texts contain for values.
    most = 0
    for start in range(0, len(raw), _PIECE):
        if start:
            yield
        most += most_values(raw[start : start + _PIECE])
    if most <= limit:
        return
    count, outside = 0, _Outside()
    for start in range(0, len(raw), _PIECE):
        yield
        count += outside.values(raw[start : start + _PIECE])
        if count > limit:
            raise BadRequestError(
                f"The request body has more than {limit} JSON values, this proxy's limit. Send "
                "fewer lists, objects, texts and numbers, or raise max_body_values.",
                code="too_many_values",
            )


def check_arguments(messages: Sequence[Message], known: int, limit: int) -> None:
    """Refuse messages whose tool calls have more than ``limit`` values in their arguments: texts of
    JSON, which a chat template may want decoded.

    Args:
        known: number of leading messages that have been checked.

    Raises:
        BadRequestError: names the message.
    """
    count = size = 0
    for index, message in enumerate(messages[known:], known):
        for text in _arguments_of(message):
            size += len(text)
            if size <= limit // 2:
                continue
            raw, outside = text.encode("utf-8", "surrogatepass"), _Outside()
            for start in range(0, len(raw), _PIECE):
                count += outside.values(raw[start : start + _PIECE])
                if count > limit:
                    field = f"messages[{index}].tool_calls"
                    raise BadRequestError(
                        f"The arguments of {field} and those before have more than {limit} JSON "
                        "values, this proxy's limit. Send fewer, or raise max_body_values.",
                        param=field,
                        code="too_many_values",
                    )


def _arguments_of(message: Message) -> Iterator[str]:
    for call in message.get("tool_calls") or ():
        function = call.get("function")
        text = function.get("arguments") if isinstance(function, dict) else None
        if isinstance(text, str):
            yield text


def most_values(raw: bytes) -> int:
    """Return a number that the values in ``raw`` don't exceed, in any encoding."""
    return len(raw) - len(raw.translate(None, _COUNTED))


class _Outside:
    """Counts the values in consecutive pieces of JSON, without what texts contain."""

    def __init__(self) -> None:
        self._inside = False
        self._escape = b""

    def values(self, piece: bytes) -> int:
        """Return the values of the next piece."""
        # Without pairs of backslashes, one that is left escapes the byte after it.
        plain = (self._escape + piece).replace(b"\\\\", b"")
        self._escape = b"\\" if plain.endswith(b"\\") else b""
        parts = plain.removesuffix(b"\\").replace(b'\\"', b"").split(b'"')
        outside = b"".join(parts[self._inside :: 2])
        quotes = len(parts) - 1
        self._inside ^= bool(quotes % 2)
        rest, short = _SHORT_NUMBERS.subn(b"", outside)
        digits = len(rest) - len(rest.translate(None, _DIGITS))
        begun = rest.count(b"[") + rest.count(b"{") + (quotes + 1) // 2 + rest.count(b",")
        return begun + short // _SHORT_PER_VALUE + digits // _DIGITS_PER_VALUE


def decode(raw: bytes) -> Any:
    """Return the decoded JSON.

    Raises:
        msgspec.DecodeError: it isn't JSON, or has a number that no float can hold.
        UnicodeDecodeError, RecursionError: as :func:`msgspec.json.decode`.
    """
    return _decoder.decode(raw)


def _float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError("Number out of range")
    return value


# The library's own conversion takes up to 9 µs for a number of five characters, such as 1e300.
_decoder = msgspec.json.Decoder(float_hook=_float)
