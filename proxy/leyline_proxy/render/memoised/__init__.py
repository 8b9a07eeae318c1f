"""Rendering at the cost of a conversation's new part: a template that remembers its loops.

Whatever fails in here, :mod:`~leyline_proxy.render.renderer` renders the plain way.
"""

from .fragments import Conversation, FragmentMemory, MessageEntry, key_of
from .template import IncrementalTemplate, Prompt

__all__ = [
    "Conversation",
    "FragmentMemory",
    "IncrementalTemplate",
    "MessageEntry",
    "Prompt",
    "key_of",
]
