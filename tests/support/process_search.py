"""Search a process's live Python objects for a text, and for its tokens."""

from __future__ import annotations

import gc
import secrets
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import msgspec

_CODE = (type, ModuleType, FunctionType, MethodType, BuiltinFunctionType)
_CACHE = type(lru_cache(lambda: None))


_SIZED = (dict, list, set, deque)


class Marker:
    """A random text that a search finds, and that this object doesn't hold itself.

    Objects of before it are searched only where they have changed in size: most are modules and
    what these define.
    """

    def __init__(self) -> None:
        self._reversed = f"mk-{secrets.token_hex(12)}"[::-1]
        self._tokens: tuple[int, ...] = ()
        gc.collect()
        self._old = gc.get_objects()
        self._sizes = [len(each) if type(each) in _SIZED else -1 for each in self._old]

    def __str__(self) -> str:
        return self._reversed[::-1]

    def tokenised(self, tokenizer: Any) -> None:
        """Note the tokens within the text; those at its ends depend on what is around."""
        self._tokens = tuple(-each for each in tokenizer.encode(str(self)).ids[2:-2])
        assert len(self._tokens) >= 4

    def holders(
        self,
        stop: Iterable[object] = (),
        roots: Sequence[object] | None = None,
        *,
        below: Sequence[object] = (),
    ) -> set[str]:
        """Return the ways to objects that hold the text or its tokens, as names of types.

        Args:
            stop: objects that aren't looked into.
            roots: where the search begins; None for all objects.
            below: objects that may hold it, with all that is reachable through them.
        """
        gc.collect()
        wanted = _Wanted(str(self), [-each for each in self._tokens])
        ours = [self, self._old, self._sizes, wanted, wanted.tokens]
        seen = {*map(id, ours), *map(id, map(vars, (self, wanted))), *map(id, stop)}
        seen.update(map(id, self._old))
        seen |= _reachable(below)
        begin = [each for each in gc.get_objects() if id(each) not in seen]
        if roots is None:
            seen.update(map(id, begin))
        todo = [*self._changed(), *begin] if roots is None else [*roots]
        seen.add(id(begin))
        ways: dict[int, Any] = {}
        found: set[str] = set()
        seen |= {id(ways), id(found), id(todo)}
        while todo:
            each = todo.pop()
            if each is begin or each is ways or each is found:
                continue
            if wanted.is_in(each):
                found.add(_way(each, ways))
                continue
            for child in _children(each):
                if id(child) not in seen:
                    seen.add(id(child))
                    ways[id(child)] = each
                    todo.append(child)
        return found

    def _changed(self) -> Iterator[object]:
        for each, size in zip(self._old, self._sizes, strict=True):
            if (size >= 0 and len(each) != size) or type(each) is _CACHE:
                yield each


class _Wanted:
    def __init__(self, text: str, tokens: list[int]) -> None:
        self.text, self.bytes, self.tokens = text, text.encode(), tokens
        self.packed = array("q", tokens).tobytes()

    def is_in(self, each: Any) -> bool:
        kind = type(each)  # without asking objects, which may stand in for others
        if kind is str:
            return self.text in each and each is not self.text
        if kind is bytes or kind is bytearray:
            ours = each is self.bytes or each is self.packed
            return not ours and (self.bytes in each or bool(self.packed and self.packed in each))
        if kind is array:
            return bool(self.packed) and each.typecode == "q" and self.packed in each.tobytes()
        if (kind is list or kind is tuple) and self.tokens and len(each) >= len(self.tokens):
            numbers = type(each[0]) is int and type(each[-1]) is int
            return numbers and _contains(each, self.tokens)
        return False


def _contains(numbers: Sequence[Any], wanted: list[int]) -> bool:
    first, size = wanted[0], len(wanted)
    return any(
        each == first and [*numbers[at : at + size]] == wanted for at, each in enumerate(numbers)
    )


def _reachable(roots: Sequence[object]) -> set[int]:
    """The objects that others lead to, but not through classes, modules and functions."""
    todo = [*roots]
    seen = {id(each) for each in todo}
    while todo:
        for child in _children(todo.pop()):
            if id(child) not in seen and not isinstance(child, _CODE):
                seen.add(id(child))
                todo.append(child)
    return seen


def _children(each: Any) -> Iterator[object]:
    yield from gc.get_referents(each)
    if issubclass(type(each), msgspec.Struct):  # the collector knows nothing of some
        for name in each.__struct_fields__:
            yield getattr(each, name)


def _way(each: object, ways: dict[int, Any]) -> str:
    names = [type(each).__name__]
    while (each := ways.get(id(each))) is not None and len(names) < 12:
        if type(each) not in (dict, list, tuple):
            names.append(type(each).__name__)
    return " < ".join(names)
