"""A manifest's content as bytes: runs sorted, each without the tokens of the one before. Pure."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import msgspec

from leyline_engine.contract import SpanLabel

from .runs import (
    TOKEN_BYTES,
    EngineIdentity,
    Group,
    ManifestError,
    Outcome,
    Run,
    packed,
    shared_tokens,
    unpacked,
)

_LEVEL = 1


class _Entry(msgspec.Struct, frozen=True, array_like=True):
    """One run."""

    session: str
    shared: int
    """Number of leading tokens that it has in common with the entry before."""
    rest: bytes
    spans: tuple[tuple[str, int, int], ...]
    engine: str
    demands: int
    since: float
    named: bool
    at: float


class _Content(msgspec.Struct, frozen=True):
    tenant: str
    identity: EngineIdentity
    runs: tuple[_Entry, ...]


def max_content(max_tokens: int) -> int:
    """Return the largest number of bytes of a manifest with so many tokens, not compressed."""
    return 1024 * 1024 + 16 * max_tokens


def encode(group: Group, runs: Sequence[Run], max_bytes: int) -> bytes:
    """Return the runs of one manifest; of too many bytes, the oldest are left out.

    Args:
        max_bytes: largest size, not compressed.
    """
    kept = sorted(runs, key=lambda run: -run.at)
    while True:
        content = msgspec.msgpack.encode(
            _Content(group.tenant, group.identity, tuple(_entries(kept)))
        )
        if len(content) <= max_bytes or not kept:
            return zlib.compress(content, _LEVEL)
        kept = kept[: len(kept) // 2]


def _entries(runs: Sequence[Run]) -> list[_Entry]:
    found: list[_Entry] = []
    before = b""
    for data, run in sorted(((packed(run.tokens), run) for run in runs), key=lambda each: each[0]):
        shared = shared_tokens(before, data)
        found.append(
            _Entry(
                session=run.session,
                shared=shared,
                rest=data[shared * TOKEN_BYTES :],
                spans=tuple((span.span, span.start, span.end) for span in run.spans),
                engine=run.engine,
                demands=run.demands,
                since=run.since,
                named=run.named,
                at=run.at,
            )
        )
        before = data
    return found


def decode(data: bytes, *, max_bytes: int, max_tokens: int) -> tuple[Group, tuple[Run, ...]]:
    """Return the runs of a manifest, the most recent first.

    Args:
        max_bytes: largest size, not compressed.
        max_tokens: largest number of tokens of all runs, each counted in full.

    Raises:
        ManifestError: corrupt, or too large.
    """
    try:
        inflater = zlib.decompressobj()
        content = inflater.decompress(data, max_bytes + 1)
        if len(content) > max_bytes:
            raise ManifestError(Outcome.TOO_LARGE)
        if not inflater.eof or inflater.unused_data:
            raise ManifestError(Outcome.CORRUPT)
        found = msgspec.msgpack.decode(content, type=_Content)
        group = Group(found.tenant, found.identity)
        runs = _runs(group, found.runs, max_tokens)
    except (zlib.error, msgspec.DecodeError, ValueError) as error:
        raise ManifestError(Outcome.CORRUPT) from error
    return group, tuple(sorted(runs, key=lambda run: -run.at))


def _runs(group: Group, entries: Sequence[_Entry], max_tokens: int) -> list[Run]:
    found: list[Run] = []
    before = b""
    left = max_tokens * TOKEN_BYTES
    for entry in entries:
        shared = entry.shared * TOKEN_BYTES
        if not 0 <= shared <= len(before):
            raise ManifestError(Outcome.CORRUPT)
        left -= shared + len(entry.rest)
        if left < 0:
            raise ManifestError(Outcome.TOO_LARGE)
        before = before[:shared] + entry.rest
        found.append(
            Run(
                tenant=group.tenant,
                session=entry.session,
                identity=group.identity,
                tokens=unpacked(before),
                spans=tuple(SpanLabel(*span) for span in entry.spans),
                engine=entry.engine,
                demands=entry.demands,
                since=entry.since,
                named=entry.named,
                at=entry.at,
            )
        )
    return found
