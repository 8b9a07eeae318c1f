"""Rendering chats to tokens in the proxy, exactly as the engine does."""

from .dialects import RenderError, dialect_of
from .renderer import STEERING, ChatRenderer, steering_digest

__all__ = ["STEERING", "ChatRenderer", "RenderError", "dialect_of", "steering_digest"]
