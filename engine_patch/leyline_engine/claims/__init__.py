"""KV that must stay is a contract: claims, their lifecycle, what they cost others, and its proof.

Pure: no tensors, no event loop, no clock. An engine holds a :class:`~.book.ClaimBook`, carries out
its effects, and records what it does as events; ``docs/claims.md`` says how it fits together.
"""
