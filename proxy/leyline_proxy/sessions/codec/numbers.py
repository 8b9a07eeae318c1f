"""Sequences of integers as bytes, against those of another turn. Little endian, as machines are."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from .records import Shared, Tokens

NARROW, WIDE = 4, 8
"""Bytes of an id."""


def pack_tokens(ids: array[int], base: array[int] | None = None) -> Tokens:
    """Token ids (signed 64-bit) without what they share with ``base`` from the start."""
    common = 0 if base is None else common_start(memoryview(ids), memoryview(base))
    rest = memoryview(ids)[common:].cast("B")
    halves = rest.cast("i")
    if halves[1::2].tobytes().strip(b"\0"):
        return Tokens(common, WIDE, rest.tobytes())
    return Tokens(common, NARROW, halves[::2].tobytes())


def unpack_tokens(packed: Tokens, base: array[int] | None = None) -> array[int]:
    """The ids again.

    Raises:
        ValueError: these are no packed ids, or not of this base.
    """
    if packed.width == WIDE:
        rest = packed.rest
    elif packed.width == NARROW:
        wide = bytearray(2 * len(packed.rest))
        memoryview(wide).cast("i")[::2] = memoryview(packed.rest).cast("i")
        rest = bytes(wide)
    else:
        raise ValueError("an unknown width")
    ids = _start(array("q") if base is None else base, packed.common)
    ids.frombytes(rest)
    return ids


def pack_places(places: Iterable[int], base: array[int] | None = None) -> Shared:
    """Places in a table without what they share with ``base`` from the start."""
    own = array("i", places)
    common = 0 if base is None else common_start(memoryview(own), memoryview(base))
    return Shared(common, own[common:].tobytes())


def unpack_places(packed: Shared, base: array[int] | None = None) -> array[int]:
    """The places again.

    Raises:
        ValueError: these are no packed places, or not of this base.
    """
    places = _start(array("i") if base is None else base, packed.common)
    places.frombytes(packed.rest)
    return places


def common_start(left: memoryview, right: memoryview) -> int:
    """How many items two sequences of one type begin with alike."""
    size, width = min(len(left), len(right)), left.itemsize
    a, b = left.cast("B"), right.cast("B")
    known, beyond = 0, size + 1  # alike up to ``known``, and not up to ``beyond``
    step = size
    while step:
        end = known + step
        # Bytes are compared by the machine, views item by item.
        if end < beyond and end <= size:
            if bytes(a[known * width : end * width]) == bytes(b[known * width : end * width]):
                known = end
                continue
            beyond = end
        step //= 2
    return known


def _start(base: array[int], common: int) -> array[int]:
    if not 0 <= common <= len(base):
        raise ValueError("not of this base")
    return base[:common]


def triples(values: Sequence[int]) -> Iterable[tuple[int, int, int]]:
    """Three by three.

    Raises:
        ValueError: some are left over.
    """
    each = iter(values)
    return zip(each, each, each, strict=True)
