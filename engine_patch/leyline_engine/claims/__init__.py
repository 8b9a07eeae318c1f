"""Claims, the contract for KV that must stay: their lifecycle and their cost to others.

Pure: no tensors, no event loop, no clock. An engine holds a :class:`~.book.ClaimBook`, carries out
its effects, and records what it does as events; ``docs/claims.md`` says how it fits together.
"""
