"""From messages to tokens and from tokens to text."""
