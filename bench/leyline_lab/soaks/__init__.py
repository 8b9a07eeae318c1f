"""Long runs of random sessions, as tests for leaks, hangs and wrong answers."""
