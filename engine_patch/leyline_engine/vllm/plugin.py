"""Entry point ``leyline`` of ``vllm.general_plugins``: runs in every vLLM process."""

from __future__ import annotations


def register() -> None:
    """Extend this vLLM process: the HTTP routes."""
    from leyline_engine.vllm.server.http import register_http

    register_http()
