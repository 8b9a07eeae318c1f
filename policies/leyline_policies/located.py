"""YAML whose every value has its line and column, and that can't be made to blow up.

Plain values are read as YAML 1.2 does: ``true``, ``null`` and numbers, all else is text (so ``on``,
``no`` and ``12:30`` are). Tags and merge keys aren't understood, keys are text and unique, and
aliases may repeat things only so often.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from leyline_policies.errors import PolicyError, SpecError, shown

if TYPE_CHECKING:
    from yaml.nodes import MappingNode, Node, ScalarNode

MAX_BYTES = 1_000_000
MAX_VALUES = 20_000
MAX_DEPTH = 32

_INTEGER = re.compile(r"[-+]?[0-9]{1,300}")
_NUMBER = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_WORDS: dict[str, bool | None] = {"": None, "~": None, "null": None, "true": True, "false": False}
_PREFIX = "tag:yaml.org,2002:"
_TAGS = frozenset(_PREFIX + name for name in ("str", "seq", "map"))
_MERGE = "<<"


class MissingExtraError(PolicyError):
    """The YAML library is not installed."""

    def __init__(self) -> None:
        super().__init__(
            "PyYAML, which reads YAML, is not installed; install it with: pip install pyyaml"
        )


class ConfigError(SpecError):
    """A configuration file is wrong; the message begins with ``file:line:column``."""

    def __init__(self, message: str, source: str, at: tuple[int, int] | None = None) -> None:
        place = source if at is None else f"{source}:{at[0]}:{at[1]}"
        super().__init__(f"{place}: {message}")
        self.source = source
        self.line = at[0] if at is not None else None
        self.column = at[1] if at is not None else None


@dataclass(frozen=True, slots=True)
class Located:
    """A value and the place where it begins; lines and columns count from 1."""

    value: bool | int | float | str | list[Located] | dict[str, Located] | None
    at: tuple[int, int]
    keys_at: dict[str, tuple[int, int]]
    """Places of an object's keys."""

    def plain(self) -> Any:
        """Return the value without its places."""
        if isinstance(self.value, list):
            return [item.plain() for item in self.value]
        if isinstance(self.value, dict):
            return {key: item.plain() for key, item in self.value.items()}
        return self.value


def read_yaml(text: str, source: str) -> Located:
    """Return the one document in ``text``.

    Args:
        source: the file's name, for errors.

    Raises:
        ConfigError: names line and column of a part that can't be read or isn't allowed.
        MissingExtraError: PyYAML is not installed.
    """
    try:
        import yaml
    except ImportError as error:
        raise MissingExtraError from error
    if len(text.encode("utf-8", "surrogatepass")) > MAX_BYTES:
        raise ConfigError(f"the file is larger than {MAX_BYTES // 1_000_000} MB", source)
    try:
        node = yaml.compose(text, Loader=yaml.BaseLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = (mark.line + 1, mark.column + 1) if mark is not None else None
        problem = " ".join(filter(None, (error.context, error.problem)))
        raise ConfigError(f"no YAML: {problem}", source, at) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"no YAML: {' '.join(str(error).split())}", source) from error
    except RecursionError as error:
        raise ConfigError("lists and objects are nested too deep", source) from error
    if node is None:
        raise ConfigError("the file is empty", source, (1, 1))
    return _Reader(source).read(node, ())


class _Reader:
    def __init__(self, source: str) -> None:
        self._source = source
        self._count = 0

    def read(self, node: Node, around: tuple[Node, ...]) -> Located:
        from yaml.nodes import MappingNode, SequenceNode

        self._count += 1
        if self._count > MAX_VALUES:
            raise self._error(f"more than {MAX_VALUES:,} values, aliases written out", node)
        if any(node is outer for outer in around):
            raise self._error("an alias stands inside what it repeats", node)
        if len(around) >= MAX_DEPTH:
            raise self._error("lists and objects are nested too deep", node)
        if node.tag not in _TAGS:
            raise self._error(f"the tag {shown(node.tag.replace(_PREFIX, '!!'))} isn't known", node)
        around = (*around, node)
        if isinstance(node, SequenceNode):
            return Located([self.read(item, around) for item in node.value], _place(node), {})
        if isinstance(node, MappingNode):
            return self._object(node, around)
        return Located(_scalar(cast("ScalarNode", node)), _place(node), {})

    def _object(self, node: MappingNode, around: tuple[Node, ...]) -> Located:
        entries: dict[str, Located] = {}
        places: dict[str, tuple[int, int]] = {}
        for key, key_node, value in self._members(node):
            if key in entries:
                line = places[key][0]
                raise self._error(f"{shown(key)} is set twice; first in line {line}", key_node)
            entries[key] = self.read(value, around)
            places[key] = _place(key_node)
        return Located(entries, _place(node), places)

    def _members(self, node: MappingNode) -> Iterator[tuple[str, Node, Node]]:
        from yaml.nodes import ScalarNode

        for key_node, value in node.value:
            if not isinstance(key_node, ScalarNode):
                raise self._error("a key is text, not a list or an object", key_node)
            if key_node.value == _MERGE and key_node.style is None:
                raise self._error("merge keys (<<) aren't understood; use an alias", key_node)
            yield str(key_node.value), key_node, value

    def _error(self, message: str, node: Node) -> ConfigError:
        return ConfigError(message, self._source, _place(node))


def _place(node: Node) -> tuple[int, int]:
    return node.start_mark.line + 1, node.start_mark.column + 1


def _scalar(node: ScalarNode) -> bool | int | float | str | None:
    text = str(node.value)
    if node.style is not None:  # quoted or a block
        return text
    if text in _WORDS or text.lower() in ("true", "false", "null"):
        return _WORDS[text.lower()]
    if _INTEGER.fullmatch(text):
        return int(text)
    return float(text) if _NUMBER.fullmatch(text) else text
