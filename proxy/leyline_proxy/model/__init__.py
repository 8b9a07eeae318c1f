"""What a turn is made of: messages, spans, prompts, sessions. Pure, without I/O or a framework."""
