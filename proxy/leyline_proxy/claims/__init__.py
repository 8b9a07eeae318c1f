"""Claims: resident KV that a caller, a policy or a message asks for."""
