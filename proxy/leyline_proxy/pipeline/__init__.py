"""The parts of one chat turn, each a step of its way; :mod:`leyline_proxy.turns` strings them."""
