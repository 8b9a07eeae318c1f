"""The payload of ``leyline.prove@1.0``, and the engine's proof that a forget left nothing.

The action goes with a ``leyline.edit`` that forgets. Before anything is overwritten, the engine
digests the doomed rows of its pool; when the forget is closed, it looks for them everywhere. An
engine that doesn't know the action reports it as skipped, and its receipt has no proof.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

NONCE_BYTES = 32


class ProvePayload(msgspec.Struct, frozen=True, kw_only=True):
    """The demand for a proof."""

    nonce: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
    """Key of the digests, in hexadecimal: drawn for one proof: nobody can prepare rows."""


class ProofPlace(msgspec.Struct, frozen=True, kw_only=True):
    """One place of a proof; counts only."""

    place: str
    """``pool.free``, ``pool.tree``, ``pool.running``, ``origin``, ``index``, ``sources``,
    ``ledger``, ``records`` or ``host`` in an engine; the proxy adds its own."""
    scanned: int = 0
    """Rows, entries or turns that were looked at."""
    survivors: int = 0
    kept: int = 0
    """Those that others hold because they sent the same tokens from the beginning themselves.
    Other tenants' aren't counted: a count would tell what they send."""
    chance: int = 0
    """Rows of the same tokens of which less than half is equal; of the session that has most."""
    sent_again: int = 0
    """Those that the session sent again after the forget."""
    unscanned: str = ""
    """Reason why the place could not be looked at, or not all of it."""


PLACES = frozenset(
    {"pool.free", "pool.tree", "pool.running", "origin", "index", "sources", "ledger"}
)
"""Places that every engine has to look at; its records are looked at where they are kept."""

RECORDS = "records"
"""The place of an engine's records."""

MAX_CHANCE = 0.01
"""Share of the digested rows of which others may hold a part by chance."""


class Proof(msgspec.Struct, frozen=True, kw_only=True):
    """The result of looking for doomed rows.

    It is pending until the forget is closed; only then its counts are final.
    """

    pending: bool
    doomed: int = 0
    """Rows of KV that had to go."""
    digested: int = 0
    """Those that were digested; fewer than :attr:`doomed` if memory for digests ran out."""
    places: tuple[ProofPlace, ...] = ()
    unscanned: str = ""
    """Reason why nothing could be digested or looked for."""

    @property
    def survivors(self) -> int:
        """Number of survivors in all places."""
        return sum(place.survivors for place in self.places)

    @property
    def chance(self) -> int:
        """Number of rows in all places that are equal by chance."""
        return sum(place.chance for place in self.places)

    @property
    def doubtful(self) -> bool:
        """True if more rows are equal by chance than can be."""
        return self.chance > MAX_CHANCE * self.digested

    @property
    def missing(self) -> frozenset[str]:
        """Places that were not looked at, of :data:`PLACES`."""
        return PLACES - {place.place for place in self.places}

    @property
    def complete(self) -> bool:
        """True if the forget is closed and every place was looked at for every doomed row."""
        scanned = not self.unscanned and not any(place.unscanned for place in self.places)
        all_looked_at = scanned and not self.missing and self.digested == self.doomed
        return all_looked_at and not self.pending and not self.doubtful
