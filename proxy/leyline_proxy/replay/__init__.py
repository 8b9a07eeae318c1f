"""Replays recorded agent sessions through the stack and counts where each token came from."""
