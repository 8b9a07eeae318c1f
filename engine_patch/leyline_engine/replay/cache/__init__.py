"""The KV pool, the radix tree over it, and what keeps their accounts."""
