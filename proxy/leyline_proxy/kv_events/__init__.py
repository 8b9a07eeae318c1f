"""KV events of engines, as ``leyline events`` shows them."""
