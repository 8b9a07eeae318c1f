"""Steps 3 to 6: from the messages to send to tokens, directives and the body that goes upstream."""
