"""The making of the shipped tiny models: the task, the tokenizer, training, evaluation."""
