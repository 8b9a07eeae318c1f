"""The Leyline proxy: an OpenAI-compatible service that turns history edits into cache edits."""
