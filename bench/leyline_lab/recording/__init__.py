"""Records the session that ``leyline demo`` replays. For contributors: not part of the wheel."""
