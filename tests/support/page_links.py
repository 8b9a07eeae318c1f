"""The files that a page loads, and its inline content."""

from __future__ import annotations

from html.parser import HTMLParser


class Links(HTMLParser):
    """Collects what a document loads, and what it has inline."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.inline: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """One element."""
        given = dict(attrs)
        if tag in ("script", "link", "img"):
            self.loaded.append(given.get("src") or given.get("href") or "")
        self.inline += [name for name in given if name.startswith("on") or name == "style"]
        if tag == "style" or (tag == "script" and "src" not in given):
            self.inline.append(tag)
