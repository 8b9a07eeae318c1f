"""The cost of Leyline inside an engine: its scheduler's time, its stages, its checks and rows."""
