"""The engine side of Leyline: contract, plan, rotation and the replay engine."""
