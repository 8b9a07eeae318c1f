"""Lineages: private keys for KV that remembers content no longer in the prompt.

From the first spliced position on, radix keys are private to a lineage. The key of a token is
the token id with the lineage folded into the bits above it, so that one radix tree of 64-bit
keys serves exact and spliced sequences side by side::

    bit 62 ............ 24 23 ......... 0
        lineage (39 bits)   token id          never negative, always below 2**63
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import zip_longest

import numpy as np

from leyline_engine.contract import CopySegment, LineageRun, SpanLabel, token_array

TOKEN_BITS = 24
MAX_TOKEN = (1 << TOKEN_BITS) - 1
_LINEAGE_BITS = 63 - TOKEN_BITS

SALT_BYTES = 32
"""Length of the salt that an engine draws when it starts."""


def lineage_bits(lineage: str, scope: str) -> int:
    """Return the key prefix of a lineage within a tenant scope, in ``[1, 2**39)``."""
    digest = blake2b(framed(scope) + framed(lineage), digest_size=8).digest()
    return (int.from_bytes(digest, "big") % ((1 << _LINEAGE_BITS) - 1)) + 1


def framed(part: str) -> bytes:
    """Return a part with its length, so that no two sequences of parts look alike."""
    data = part.encode("utf-8", "surrogatepass")
    return len(data).to_bytes(4, "big") + data


def derive_lineage(
    parent: str,
    scope: str,
    sources: Iterable[tuple[str, Sequence[LineageRun]]],
    copies: Iterable[CopySegment],
    *,
    salt: bytes = b"",
) -> str:
    """Return a lineage's name: hash(salt, parent lineage, tenant scope, sources, applied copies).

    Args:
        salt: at most 64 bytes, drawn at each start of the engine. Keys carry 39 bits of a name;
            without the salt, anybody could search for a name whose bits are another tenant's.
        parent: lineage in force before the first spliced position; empty for exact KV.
        sources: digest and lineage map of each source.
        copies: the executed copies, to which the directives were lowered.

    Returns:
        32 hex digits. Equal tokens reached by different edits get different names.
    """
    state = blake2b(digest_size=16, key=salt)
    state.update(framed(parent) + framed(scope))
    for digest, runs in sources:
        state.update(framed(f"source {digest}"))
        for run in runs:
            state.update(framed(f"run {run.start} {run.lineage}"))
    for copy in copies:
        state.update(framed(f"copy {copy.source} {copy.start} {copy.end} {copy.dest}"))
    return state.hexdigest()


def run_extents(runs: Sequence[LineageRun], length: int) -> Iterator[tuple[LineageRun, int]]:
    """Yield each run with its end: the start of the next, or ``length``."""
    for index, run in enumerate(runs):
        yield run, runs[index + 1].start if index + 1 < len(runs) else length


def share_lineage(share: str, *, salt: bytes = b"") -> str:
    """Return the lineage of KV that a scope within a tenant shares; empty for the empty scope.

    :func:`derive_lineage` can't return such a name, so no private lineage is ever shared.

    Args:
        salt: see :func:`derive_lineage`.
    """
    if not share:
        return ""
    return f"share {blake2b(framed(share), digest_size=16, key=salt).hexdigest()}"


def fold_keys(
    tokens: Iterable[int],
    runs: Sequence[LineageRun] = (),
    scope: str = "",
    *,
    start: int = 0,
) -> array[int]:
    """Return the radix keys of a token sequence under a lineage map.

    Args:
        tokens: token ids in ``[0, 2**24)``.
        runs: sorted by start; each reaches to the next.
        scope: tenant scope; a lineage's name means nothing outside of it.
        start: position of the first token.

    Returns:
        int64 keys of the same length; before the first run they are the ids themselves.

    Raises:
        ValueError: a token id is negative or too large to fold.
    """
    keys = array("q", token_array(tokens))
    view = np.frombuffer(keys, dtype=np.int64)
    if len(keys) and (view.min() < 0 or view.max() > MAX_TOKEN):
        raise ValueError(f"token ids must lie in [0, {MAX_TOKEN}]")
    for run, end in run_extents(runs, start + len(keys)):
        if end > start:
            governed = view[max(0, run.start - start) : end - start]
            governed |= lineage_bits(run.lineage, scope) << TOKEN_BITS
    return keys


def exact_length(keys: array[int]) -> int:
    """Return the number of leading plain keys: their KV depends on visible tokens alone."""
    if not keys:
        return 0
    folded = np.frombuffer(keys, dtype=np.int64) > MAX_TOKEN
    first = int(folded.argmax())
    return first if folded[first] else len(keys)


def first_under(keys: array[int], start: int, lineages: Mapping[int, int]) -> int:
    """Return the index of the first key under one of ``lineages``, from where each matters on.

    Args:
        keys: radix keys.
        start: position of the first of them.
        lineages: first position that matters, by :func:`lineage_bits`.

    Returns:
        An index into ``keys``; their number if there is none.
    """
    for index, key in enumerate(keys):
        if key > MAX_TOKEN and lineages.get(key >> TOKEN_BITS, sys.maxsize) <= start + index:
            return index
    return len(keys)


def runs_before(runs: Sequence[LineageRun], position: int) -> tuple[LineageRun, ...]:
    """Return the part of a lineage map that governs positions below ``position``."""
    return tuple(run for run in runs if run.start < position)


def alike_length(first: Sequence[LineageRun], second: Sequence[LineageRun], length: int) -> int:
    """Return the first of ``length`` positions that two lineage maps don't govern alike."""
    for one, other in zip_longest(first, second):
        if one != other:
            return min(length, *(run.start for run in (one, other) if run is not None))
    return length


def first_spliced(runs: Sequence[LineageRun], length: int) -> int:
    """Return the length of the exact prefix: the first spliced position, or ``length``."""
    return min((length, *(run.start for run in runs)))


def first_unlabelled(labels: Sequence[SpanLabel], length: int) -> int:
    """Return the first position that no label covers, or ``length``. Labels are sorted by start."""
    covered = 0
    for label in labels:
        if label.start > covered:
            break
        covered = max(covered, label.end)
    return min(covered, length)
