"""The live page: what happens now, told to those who look, and the page that shows it."""
