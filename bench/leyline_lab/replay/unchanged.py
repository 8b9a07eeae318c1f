"""Count of a prompt's tokens that were already in the prompt before it.

Replays are measured with it, so it shares no code with the product's own diff: it only computes the
length of the longest common subsequence.
"""

from __future__ import annotations

from collections.abc import Sequence

SINK = 32
"""First prompt position that counts: the engine always prefills those below."""


def lcs_length(left: Sequence[int], right: Sequence[int]) -> int:
    """Return the length of the longest common subsequence of two sequences of token ids.

    Bit-parallel (H. Hyyrö, 2004) on one Python integer of ``len(left)`` bits: after every item of
    ``right``, the zero bits mark the rows of the table where the length goes up by one. Time is
    ``len(right)`` operations on integers of that width.
    """
    if not left or not right:
        return 0
    masks: dict[int, int] = {}
    for position, token in enumerate(left):
        masks.setdefault(token, 0)
        masks[token] |= 1 << position
    full = (1 << len(left)) - 1
    rows = full
    for token in right:
        matches = masks.get(token)
        if matches is None:
            continue
        hit = rows & matches
        rows = ((rows + hit) | (rows - hit)) & full
    return len(left) - rows.bit_count()


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Return the number of tokens with which two prompts begin alike."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(left), len(right)))


def unchanged_tokens(previous: Sequence[int], current: Sequence[int], *, boundary: int = 0) -> int:
    """Return the number of tokens of ``current`` available from the cache of ``previous``.

    Destinations that the contract prefills don't count: the first ``SINK`` positions, the last
    token (the request needs its logits) and ``boundary`` tokens, a number that the caller declared
    for the whole request. Never negative.
    """
    reachable = current[SINK : max(SINK, len(current) - 1)]
    return max(0, lcs_length(previous, reachable) - boundary)
