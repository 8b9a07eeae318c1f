"""The policy that removes pictures from the history."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from leyline_policies.context import Context, is_picture
from leyline_policies.marks import edit
from leyline_policies.policy import Message, Mode

_ROLES = frozenset({"user", "tool", "function"})


@dataclass(frozen=True, slots=True)
class DropImages:
    """Replace all but the newest ``keep_last`` pictures by a line of text.

    Pictures are parts of messages of the user and of tool results. The line names the kind and
    size of a picture that came as data; nothing is said of an address. With 0 no picture reaches
    the model, not even one in the newest message: for models that read text only.
    """

    name: ClassVar[str] = "drop_images"
    mode: ClassVar[Mode] = "amortize"
    trusted: ClassVar[bool] = True

    keep_last: int = 0

    def __post_init__(self) -> None:
        """Raise ValueError for a negative ``keep_last``."""
        if self.keep_last < 0:
            raise ValueError(f"keep_last={self.keep_last} is negative; it must be 0 or more")

    def transform(self, messages: list[Message], turn_idx: int, context: Context) -> list[Message]:
        """Return the messages without the older pictures."""
        if not context.any(messages, _images_in):
            return messages
        images = context.each(messages, _images_in)
        left = self.keep_last
        edited: list[Message] | None = None
        for index in range(len(messages) - 1, -1, -1):
            message, held = messages[index], images[index]
            kept = min(left, held)
            left -= kept
            if kept < held:
                edited = list(messages) if edited is None else edited
                edited[index] = context.once(message, _Without(held - kept), held - kept)
        return messages if edited is None else edited


def _images_in(message: Message) -> int:
    if type(message.get("content")) is not list or message.get("role") not in _ROLES:
        return 0
    return sum(is_picture(part) for part in message["content"])


@dataclass(frozen=True, slots=True)
class _Without:
    """A message without its first ``count`` pictures."""

    count: int

    def __call__(self, message: Message) -> Message:
        left = self.count
        parts = []
        for part in message["content"]:
            drops = left > 0 and is_picture(part)
            left -= drops
            parts.append(_stub(part) if drops else part)
        return edit(message, content=parts, cause="image")


def _stub(part: dict[str, Any]) -> dict[str, Any]:
    kind = "input_text" if part["type"] == "input_image" else "text"
    described = _described(part)
    stub: dict[str, Any] = {"type": kind, "text": f"[image removed{described}]"}
    if "cache_control" in part:
        stub["cache_control"] = part["cache_control"]
    return stub


def _described(part: dict[str, Any]) -> str:
    """Return the picture's type and size if it came as data."""
    address = part.get("image_url") or part.get("source")
    if isinstance(address, dict):
        address = address.get("url") or address.get("data")
    if not isinstance(address, str) or not address.startswith("data:"):
        return ""
    head, _, data = address.partition(",")
    kind = head.removeprefix("data:").partition(";")[0] or "data"
    size = len(data) * 3 // 4 if head.endswith(";base64") else len(data)
    return f": {kind[:40]}, {-(-size // 1024)} KiB"
