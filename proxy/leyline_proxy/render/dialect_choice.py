"""The dialect that an engine names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from leyline_engine.contract import ChatDialect, template_takes_parts

from .dialects import ContractDialect, Dialect, SglangDialect
from .vllm_dialect import vllm_dialect


def dialect_of(
    name: str,
    chat_template: str,
    *,
    takes_parts: bool | None = None,
    defaults: Mapping[str, Any] | None = None,
    withholds_tools: bool = False,
) -> Dialect:
    """Return the dialect that an engine's renderer document names.

    Args:
        takes_parts: the engine's value; None leaves it to the template's source.
        defaults: the engine's own template options.
        withholds_tools: True if tools that may not be called aren't in prompts.

    Raises:
        ValueError: no such dialect.
        jinja2.TemplateError: the template isn't one.
    """
    parts = template_takes_parts(chat_template) if takes_parts is None else takes_parts
    given = dict(defaults or {})
    match ChatDialect(name):
        case ChatDialect.VLLM:
            return vllm_dialect(
                chat_template, parts=parts, defaults=given, withholds_tools=withholds_tools
            )
        case ChatDialect.SGLANG:
            return SglangDialect(parts, given)
    return ContractDialect(parts)
