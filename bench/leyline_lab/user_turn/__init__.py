"""``leyline bench user-turn``: the first turn after an agent that thinks was answered."""
