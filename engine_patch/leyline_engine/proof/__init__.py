"""Proofs that a forget left nothing: digests of doomed rows, and the search for them."""
