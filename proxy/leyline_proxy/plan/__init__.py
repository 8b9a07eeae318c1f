"""Steps 3 to 6: turn the messages into tokens, directives and the upstream body."""
