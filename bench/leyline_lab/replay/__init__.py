"""Replay of recorded agent sessions through the stack, with the source of each token counted."""
