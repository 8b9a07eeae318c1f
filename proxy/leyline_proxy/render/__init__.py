"""Rendering chats to tokens in the proxy, exactly as the engine does."""

from .renderer import ChatRenderer, RenderError

__all__ = ["ChatRenderer", "RenderError"]
