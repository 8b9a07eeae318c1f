"""Digests of the tools and options of a prompt, as its template shows them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Any

import msgspec
import xxhash

from .template import ChatTemplate

Tools = Sequence[Mapping[str, Any]] | None

_MAX_REMEMBERED = 1024
"""Digests that are remembered; others are computed again."""

_PROBES: tuple[list[dict[str, str]], ...] = (
    [{"role": "user", "content": "-"}],
    [{"role": "system", "content": "-"}, {"role": "user", "content": "-"}],
)
"""Conversations in which a template shows its tools."""


class ToolDigests:
    """The digests of a template. Safe to use from several threads.

    Args:
        source: of the template.
    """

    def __init__(self, template: ChatTemplate, source: str) -> None:
        self._template = template
        self._shows_tools = "tools" in source
        self._known: OrderedDict[int, str] = OrderedDict()
        self._lock = Lock()

    def of(self, tools: Tools, template_kwargs: Mapping[str, Any]) -> str:
        """Return the digest: equal options and an equal text of the tools have an equal one.

        So the order of a tool's members counts only if the template shows it.
        """
        options = in_order(template_kwargs)
        if not tools or not self._shows_tools:
            return digest_of([None, options])
        key = xxhash.xxh3_64_intdigest(msgspec.json.encode([tools, template_kwargs]))
        with self._lock:
            known = self._known.get(key)
            if known is not None:
                self._known.move_to_end(key)
                return known
        found = digest_of([self._shown(tools, template_kwargs), options])
        with self._lock:
            self._known[key] = found
            while len(self._known) > _MAX_REMEMBERED:
                self._known.popitem(last=False)
        return found

    def _shown(self, tools: Tools, template_kwargs: Mapping[str, Any]) -> list[str]:
        """Return the texts that have the tools; their JSON if the template doesn't show them."""
        texts = self._texts(tools, template_kwargs)
        if not texts or texts == self._texts(None, template_kwargs):
            return [msgspec.json.encode(tools).decode()]
        return texts

    def _texts(self, tools: Tools, template_kwargs: Mapping[str, Any]) -> list[str]:
        texts = []
        for probe in _PROBES:
            try:
                variables = self._template.variables(tools, True, template_kwargs)
                # Another day is no other tool.
                variables["strftime_now"] = str
                texts.append(self._template.render(probe, variables))
            except Exception:  # noqa: S112 - a template may raise anything; the other probe remains
                continue
        return texts


def in_order(options: Mapping[str, Any]) -> dict[str, str]:
    """Return options whose own order doesn't count, but that of the members of each."""
    return {name: msgspec.json.encode(value).decode() for name, value in options.items()}


def digest_of(context: Any) -> str:
    """Return a digest of a JSON value; the order of members doesn't count."""
    return xxhash.xxh3_64_hexdigest(msgspec.json.encode(context, order="deterministic"))
