"""The policy that prunes old tool results after a pause, when the cache is gone anyway."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, ClassVar
from zlib import crc32

from leyline_policies.builtin.old_results import check_head_and_tail
from leyline_policies.builtin.tool_results import (
    check_numbers,
    check_tools,
    result_stub,
    tool_names,
)
from leyline_policies.context import Context
from leyline_policies.conversation import nth_last, text_of
from leyline_policies.marks import edit
from leyline_policies.policy import Message, Mode
from leyline_policies.triggers import duration_s

_IMAGES = ("image_url", "input_image", "image")
_IMAGE_MARKER = "[image removed during context pruning]"


@dataclass(frozen=True, slots=True)
class _Bounds:
    """Bounds of pruning: results before ``cleared`` are cleared, before ``trimmed`` trimmed."""

    trimmed: int = 0
    cleared: int = 0


@dataclass(frozen=True, slots=True)
class CacheTtlPrune:
    """Prune old tool results on a turn that comes ``ttl`` or more after the one before.

    A ``ttl`` is written as ``5m``, ``1h``, or seconds without a unit. By then a provider's prompt
    cache has expired, so that an edit costs nothing. If the conversation fills ``soft_ratio`` of
    the model's window, results of more than ``soft_max_chars`` characters become their first
    ``head_chars`` and last ``tail_chars``, and images are removed. If it then still fills
    ``hard_ratio``, and results hold ``min_prunable_chars`` characters or more, the oldest become a
    placeholder until it doesn't. Results before the first user message, or after the
    ``keep_last_assistants``-th last assistant message, stay. Results pruned once stay pruned on
    later turns, or the cache would be lost twice. ``tools`` and ``exclude_tools`` are names, or
    patterns such as ``browser_*``, in any case; ``window_tokens`` is used where the model's window
    is unknown (without either, nothing is pruned).

    The rule is OpenClaw's (openclaw 2026.9.6, ``pruneExpiredCacheTtlToolResults``;
    docs/concepts/session-pruning.md). Different from it: fill is measured in tokens, not estimated
    from characters; a list with parts besides texts and images is cleared, but not trimmed.
    """

    name: ClassVar[str] = "cache_ttl_prune"
    mode: ClassVar[Mode] = "amortize"
    trusted: ClassVar[bool] = True

    ttl: str = "5m"
    keep_last_assistants: int = 3
    soft_ratio: float = 0.3
    hard_ratio: float = 0.5
    min_prunable_chars: int = 50_000
    soft_max_chars: int = 4_000
    head_chars: int = 1_500
    tail_chars: int = 1_500
    hard_clear: bool = True
    placeholder: str = "[Old tool result content cleared]"
    tools: tuple[str, ...] | None = None
    exclude_tools: tuple[str, ...] = ()
    window_tokens: int | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for a duration that can't be read or a number out of range."""
        try:
            duration_s(self.ttl)
        except ValueError as error:
            raise ValueError(f"ttl: {error}") from error
        check_numbers(
            0,
            keep_last_assistants=self.keep_last_assistants,
            soft_ratio=self.soft_ratio,
            hard_ratio=self.hard_ratio,
            min_prunable_chars=self.min_prunable_chars,
            head_chars=self.head_chars,
            tail_chars=self.tail_chars,
        )
        check_numbers(1, window_tokens=self.window_tokens)
        check_head_and_tail(self.head_chars, self.tail_chars, "soft_max_chars", self.soft_max_chars)
        check_tools("tools", self.tools)

    def transform(self, messages: list[Message], turn_idx: int, context: Context) -> list[Message]:
        """Return the messages with what is pruned, and more of it after a pause."""
        bounds = self._held(messages, context)
        window = context.window or self.window_tokens
        expired = context.idle_s >= duration_s(self.ttl)
        if not bounds.trimmed and not (window and expired):
            return messages
        prunable = self._prunable(messages, context)
        if window and expired:
            bounds = self._prune(messages, prunable, bounds, window, context)
        return self._view(messages, prunable, bounds, context)

    def _held(self, messages: Sequence[Message], context: Context) -> _Bounds:
        """Return the bounds of earlier turns' pruning; none in a conversation not theirs."""
        state = context.state
        last = state.get("last", -1)
        if not 0 <= last < len(messages) or _fingerprint(messages[last]) != state.get("print"):
            return _Bounds()
        return _Bounds(state["trimmed"], state["cleared"])

    def _prunable(self, messages: list[Message], context: Context) -> list[int]:
        """Return the results after the first user message, of the tools that may be pruned."""
        start = next((i for i, m in enumerate(messages) if m.get("role") == "user"), len(messages))
        found = [i for i in context.results(messages) if i > start]
        if self.tools is None and not self.exclude_tools:
            return found
        names = tool_names(messages, context)
        return [i for i in found if self._allows(names[i])]

    def _allows(self, tool: str) -> bool:
        if _matches(tool, self.exclude_tools):
            return False
        return self.tools is None or _matches(tool, self.tools)

    def _prune(
        self,
        messages: list[Message],
        prunable: Sequence[int],
        bounds: _Bounds,
        window: int,
        context: Context,
    ) -> _Bounds:
        """Return the bounds after a pause; the state holds them if they prune more than before."""
        keep = self.keep_last_assistants
        cutoff = nth_last(messages, "assistant", keep) if keep else len(messages)
        before = self._view(messages, prunable, bounds, context)
        if cutoff is None or context.total(before) < self.soft_ratio * window:
            return bounds
        cleared = bounds.cleared
        trimmed = max(bounds.trimmed, cutoff)
        view = list(self._view(messages, prunable, _Bounds(trimmed, cleared), context))
        left = [i for i in prunable if cleared <= i < cutoff]
        full = context.total(view)
        chars = sum(len(text_of(view[i])) for i in left)
        if self.hard_clear and chars >= self.min_prunable_chars:
            for i in left:
                if full < self.hard_ratio * window:
                    break
                gone = context.once(messages[i], self._cleared, "cleared")
                full -= context.tokens(view[i]) - context.tokens(gone)
                view[i], cleared = gone, i + 1
        changed = [i for i in prunable if view[i] is not before[i]]
        if not changed:
            return bounds
        context.state.update(
            trimmed=trimmed,
            cleared=cleared,
            last=changed[-1],
            print=_fingerprint(messages[changed[-1]]),
        )
        return _Bounds(trimmed, cleared)

    def _view(
        self, messages: list[Message], prunable: Sequence[int], bounds: _Bounds, context: Context
    ) -> list[Message]:
        """Return the messages with the prunable results within ``bounds`` as they are sent."""
        first, end = (bisect_left(prunable, bound) for bound in (bounds.cleared, bounds.trimmed))
        view = messages
        if first:
            view = context.edited(view, self._cleared, prunable[:first], "cleared")
        if end > first:
            view = context.edited(view, self._trimmed, prunable[first:end], "trimmed")
        return view

    def _cleared(self, message: Message) -> Message:
        return result_stub(message, self.placeholder)

    def _trimmed(self, message: Message) -> Message:
        texts, images = _segments(message.get("content"))
        whole = text = "\n".join(texts)
        if len(whole) > self.soft_max_chars:
            tail = whole[len(whole) - self.tail_chars :]
            short = (
                f"{whole[: self.head_chars]}\n...\n{tail}\n\n[Tool result trimmed: kept first "
                f"{self.head_chars} chars and last {self.tail_chars} chars of {len(whole)} chars.]"
            )
            text = min(short, whole, key=len)
        return edit(message, content=text) if images or text != whole else message


def _segments(content: Any) -> tuple[list[str], bool]:
    """Return a result's texts with a marker for each image, and True if there are images.

    Empty for a content that can't be trimmed.
    """
    if isinstance(content, str):
        return [content], False
    texts: list[str] = []
    images = False
    for part in content if isinstance(content, list) else ():
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif isinstance(part, dict) and part.get("type") in _IMAGES:
            texts.append(_IMAGE_MARKER)
            images = True
        else:
            return [], False
    return texts, images


def _matches(tool: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(tool.lower(), pattern.lower()) for pattern in patterns)


def _fingerprint(message: Message) -> int:
    """Return a hash that distinguishes results in one place, and reveals nothing of them."""
    return crc32(f"{message.get('tool_call_id')}/{len(text_of(message))}".encode())
