"""One module per board; each has its rows as functions."""
