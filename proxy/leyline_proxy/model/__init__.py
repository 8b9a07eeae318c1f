"""The parts of a turn: messages, spans, prompts, sessions. Pure, without I/O or a framework."""
