"""Rendering of chats to tokens in the proxy, exactly as in the engine."""

from .dialect_choice import dialect_of
from .dialects import PromptTooLargeError, RenderError
from .renderer import PROMPT_MEMBERS, ChatRenderer, steering_digest

__all__ = [
    "PROMPT_MEMBERS",
    "ChatRenderer",
    "PromptTooLargeError",
    "RenderError",
    "dialect_of",
    "steering_digest",
]
