"""Rendering of chats to tokens in the proxy, exactly as in the engine."""

from .dialects import RenderError, dialect_of
from .renderer import STEERING, ChatRenderer, steering_digest

__all__ = ["STEERING", "ChatRenderer", "RenderError", "dialect_of", "steering_digest"]
