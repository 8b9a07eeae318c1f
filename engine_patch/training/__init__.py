"""How the shipped tiny models are made: the task, the tokenizer, training, evaluation."""
