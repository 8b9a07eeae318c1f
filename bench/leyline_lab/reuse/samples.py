"""The requests and the measurements of ``leyline bench reuse``. Pure, without arrays or tensors."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """A prompt in tokens, and the session that sends it."""

    session: str
    tokens: array[int]


@dataclass(frozen=True, slots=True)
class Closeness:
    """A distribution at each generated position, compared with the full prefill's.

    Both are computed along the full prefill's greedy tokens.
    """

    kl: tuple[float, ...]
    """KL(p_full || p_x) in nats, by position."""
    equal: tuple[bool, ...]
    """True where both have the same likeliest token."""

    @property
    def first_divergence(self) -> int:
        """Number of equal tokens before the first other one of free-running greedy decoding.

        Up to there the tokens that are fed back are the same, forced or not.
        """
        return self.equal.index(False) if False in self.equal else len(self.equal)


@dataclass(frozen=True, slots=True)
class Sample:
    """One request, served once by each arm; None or absent is not measured."""

    prompt: int
    """Number of its tokens, as all counts below."""
    prefix: int
    reused: int
    recoverable: int | None
    arms: Mapping[str, int] = field(default_factory=dict)
    """Tokens beyond the prefix that other methods find in the same live sequences, by method."""
    radix_prefix: int = 0
    """The prefix with reuse off."""
    live_ms: float | None = None
    """Time to the first token."""
    radix_ms: float | None = None
    """The same with reuse off."""
    live: Closeness | None = None
    naive: Closeness | None = None
    naive_reused: int | None = None
    """The tokens that the control copied: the same, unless it is broken."""
