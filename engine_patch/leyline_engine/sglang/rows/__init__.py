"""Rows of SGLang's pools: where they lie, on the device and in the host's memory."""
