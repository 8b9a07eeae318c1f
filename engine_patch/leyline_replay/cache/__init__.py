"""The KV pool, the radix tree over it, and their accounts."""
