"""Models as SGLang loads them, small and with random weights, and what it says of them."""
