"""Regular expressions that are matched in time proportional to the text, by RE2.

RE2 reads bytes. A pattern tells few characters apart, so each text is first written in an alphabet
of the pattern's own, a byte for each character: places in it are places in the text, and `\\w` or
`\\b` mean what they mean to `regex`, whatever the script.
"""

from __future__ import annotations

import importlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

Range = tuple[int, int]
"""First and last code point."""

LAST = 0x10FFFF
_CASED_END = 0x1F000
"""No letter from here on has another case."""
_DOTTED, _DOTLESS = 0x130, 0x131
_EQUAL_CAPITALS = ((0x390, 0x1FD3), (0x3B0, 0x1FE3), (0xFB05, 0xFB06))
"""Letters alike by capitals of several letters."""


@lru_cache(maxsize=1)
def categories() -> Mapping[str, tuple[Range, ...]]:
    """Return the ranges of ``word``, ``digit`` and ``space``; of those in ASCII as ``a:word``…"""
    import regex

    everything = "".join(map(chr, range(LAST + 1)))
    found = {"word": r"\w+", "digit": r"\d+", "space": r"\s+"}
    found |= {f"a:{name}": f"(?a){text}" for name, text in found.items()}
    return {
        name: tuple((run.start(), run.end() - 1) for run in regex.finditer(text, everything))
        for name, text in found.items()
    }


@lru_cache(maxsize=1)
def case_variants() -> Mapping[int, frozenset[int]]:
    """Return for each code point that has variants all that are alike but for case, itself too."""
    groups: dict[int, frozenset[int]] = {}
    for code in {*range(_CASED_END)} - {_DOTTED, _DOTLESS}:
        char = chr(code)
        others = {char.lower(), char.upper(), char.title()} - {char}
        if others:
            _join(groups, {code, *(ord(other) for other in others if len(other) == 1)})
    for pair in _EQUAL_CAPITALS:
        _join(groups, {*pair})
    small, capital = map(ord, "iI")
    # Not alike among themselves: each is a letter's other case in Turkish only.
    return groups | {
        small: frozenset({small, capital, _DOTTED}),
        capital: frozenset({small, capital, _DOTLESS}),
        _DOTTED: frozenset({small, _DOTTED}),
        _DOTLESS: frozenset({capital, _DOTLESS}),
    }


def _join(groups: dict[int, frozenset[int]], alike: set[int]) -> None:
    joined = frozenset(alike).union(*(groups.get(code, frozenset()) for code in alike))
    if len(joined) > 1:
        groups.update(dict.fromkeys(joined, joined))


MAX_PROGRAM = 2_000
"""Maximum number of a program's instructions. At worst, a character costs time for each of them."""
MAX_WORK = 200_000_000
"""Maximum number of instructions times characters of one search: seconds at the very worst."""

_MEMORY_BYTES = 512 * 1024
_MOST_VARIANTS = 20_000
_MOST_REPEATS = 1_000
_MOST_CLASSES = 128
_REMEMBERED = 4096
_NEWLINE, _INNER_NEWLINE = 0x0A, 0x00
_LAST_ASCII = 0x7F
_WORD_BYTES = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_"
_OTHER_BYTES = bytes(byte for byte in range(1, 256) if byte != _NEWLINE)
_MEANT = "meant"


class NotLinearError(ValueError):
    """A construct that can't be matched in linear time; the message names it."""


class Found(NamedTuple):
    """A match: the places of its groups, of which only ``meant`` is kept besides the whole."""

    text: str
    spans: tuple[Range, ...]

    def span(self, group: int | str = 0) -> Range:
        """Return first place and end of a group; -1 and -1 if it took no part."""
        return self.spans[0 if group == 0 else 1]

    def start(self) -> int:
        """Return the first place of the match."""
        return self.spans[0][0]

    def group(self) -> str:
        """Return the text of the match."""
        return self.text[slice(*self.spans[0])]


@dataclass(frozen=True, slots=True)
class LinearPattern:
    """A pattern as RE2 runs it."""

    size: int
    """Instructions of the program."""
    _program: Any = field(repr=False)
    _alphabet: _Alphabet = field(repr=False)

    def is_in_reach(self, text: str) -> bool:
        """Return True if a search of ``text`` is small enough."""
        return len(text) * self.size <= MAX_WORK

    def is_in(self, text: str) -> bool:
        """Return True if it matches anywhere in ``text``."""
        return self._program.search(self._alphabet.written(text)) is not None

    def matches(self, text: str) -> Iterator[Found]:
        """Yield its matches in ``text``, in order."""
        for found in self._program.finditer(self._alphabet.written(text)):
            ends = range(1 + self._program.groups)
            yield Found(text, tuple(map(found.span, ends)))


@lru_cache(maxsize=64)
def linear_pattern(pattern: str) -> LinearPattern:
    """Return the pattern for RE2.

    Raises:
        NotLinearError: RE2 can't express it, or it is too large.
        re.error, RecursionError, OverflowError: it is no regular expression.
    """
    parser = importlib.import_module("re._parser")
    parsed = parser.parse(pattern)
    if parsed.getwidth()[0] == 0:
        raise NotLinearError("it may match empty text")
    writer = _Writer(parser, parsed.state.groupdict.get(_MEANT))
    parts = writer.sequence(parsed, parsed.state.flags)
    if writer.is_final and writer.in_lines:
        raise NotLinearError("it has ^ or $ both with the flag m and $ without")
    alphabet = _alphabet(writer)
    text = "".join(each if isinstance(each, str) else alphabet.classes[each] for each in parts)
    import re2

    options = re2.Options()
    options.encoding = re2.Options.Encoding.LATIN1
    options.max_mem = _MEMORY_BYTES
    options.log_errors = False
    try:
        program = re2.compile(text.encode("latin-1"), options)
    except re2.error as error:
        raise NotLinearError("it repeats too much within repetitions") from error
    if program.programsize > MAX_PROGRAM:
        raise NotLinearError(f"it has more than {MAX_PROGRAM} parts, repetitions written out")
    return LinearPattern(program.programsize, program, alphabet)


_Class = tuple[bool, frozenset[Any]]
"""Characters: True if all others are meant; ranges, and categories by name (with ``!``: others)."""
_NEWLINES: _Class = (False, frozenset({(_NEWLINE, _NEWLINE)}))


class _Writer:
    """Writes a parsed pattern for RE2: texts, and numbers of classes of characters."""

    def __init__(self, parser: Any, meant: int | None) -> None:
        self._parser = parser
        self._meant = meant
        self.classes: dict[_Class, int] = {_NEWLINES: 0}
        self.word: str | None = None
        """Category that word boundaries look at."""
        self.is_final = self.in_lines = False
        self.copies: Counter[int] = Counter()
        """How often the program holds each class."""
        self._factor = 1
        self._variants = 0

    def sequence(self, items: Any, flags: int) -> list[str | int]:
        parts: list[str | int] = []
        for kind, argument in items:
            parts += self._item(str(kind), argument, flags)
        return parts

    def _item(self, kind: str, argument: Any, flags: int) -> list[str | int]:
        if kind in _UNKNOWN:
            behind = kind.startswith("ASSERT") and argument[0] < 0
            raise NotLinearError(f"it has {'a lookbehind' if behind else _UNKNOWN[kind]}")
        if kind == "AT":
            return [self._anchor(str(argument), flags)]
        if kind == "BRANCH":
            ways = [self.sequence(way, flags) for way in argument[1]]
            return ["(?:", *ways[0], *(part for way in ways[1:] for part in ("|", *way)), ")"]
        if kind == "SUBPATTERN":
            group, more, fewer, inner = argument
            opened = "(" if group is not None and group == self._meant else "(?:"
            return [opened, *self.sequence(inner, (flags | more) & ~fewer), ")"]
        if kind in ("MAX_REPEAT", "MIN_REPEAT"):
            least, most, inner = argument
            times = self._times(least, most) + ("?" if kind == "MIN_REPEAT" else "")
            factor, self._factor = self._factor, self._factor * max(int(least), 1)
            if most is not self._parser.MAXREPEAT:
                self._factor = factor * max(int(most), 1)
            repeated = self.sequence(inner, flags)
            self._factor = factor
            return ["(?:", *repeated, ")", times]
        found = self._class(kind, argument, flags)
        self.copies[found] += self._factor
        return [found]

    def _times(self, least: Any, most: Any) -> str:
        end = None if most is self._parser.MAXREPEAT else int(most)
        if max(int(least), end or 0) > _MOST_REPEATS:
            raise NotLinearError(f"it repeats more than {_MOST_REPEATS} times")
        if end is None and least < 2:
            return "+" if least else "*"
        return f"{{{least},{'' if end is None else end}}}"

    def _anchor(self, kind: str, flags: int) -> str:
        if kind in ("AT_BOUNDARY", "AT_NON_BOUNDARY"):
            word = self._category("word", flags)
            if self.word not in (None, word):
                raise NotLinearError("it has word boundaries both with the flag a and without")
            self.word = word
            self._number((False, frozenset({word})))
            return r"\b" if kind == "AT_BOUNDARY" else r"\B"
        multiple = bool(flags & self._parser.SRE_FLAG_MULTILINE)
        if kind == "AT_END" and not multiple:
            self.is_final = True
        if kind in ("AT_END", "AT_BEGINNING") and multiple:
            self.in_lines = True
        begin = kind.startswith("AT_BEGINNING")
        if kind == "AT_END" or (kind == "AT_BEGINNING" and multiple):
            return "(?m:^)" if begin else "(?m:$)"
        return r"\A" if begin else r"\z"

    def _class(self, kind: str, argument: Any, flags: int) -> int:
        if kind == "ANY":
            every = flags & self._parser.SRE_FLAG_DOTALL
            return self._number((True, frozenset()) if every else (True, _NEWLINES[1]))
        if kind == "IN":
            negated = bool(argument) and str(argument[0][0]) == "NEGATE"
            members = [self._members(str(k), each, flags) for k, each in argument[negated:]]
            return self._number((negated, frozenset().union(*members)))
        members = [self._members("LITERAL", argument, flags)]
        return self._number((kind == "NOT_LITERAL", frozenset(members[0])))

    def _members(self, kind: str, argument: Any, flags: int) -> set[Any]:
        if kind == "CATEGORY":
            name = str(argument).removeprefix("CATEGORY_").lower()
            other = name.startswith("not_")
            return {("!" if other else "") + self._category(name.removeprefix("not_"), flags)}
        low, high = argument if kind == "RANGE" else (argument, argument)
        found: set[Any] = {(int(low), int(high))}
        if flags & self._parser.SRE_FLAG_IGNORECASE:
            ascii_only = bool(flags & self._parser.SRE_FLAG_ASCII)
            found |= {(code, code) for code in _alike(int(low), int(high), ascii_only)}
            self._variants += len(found)
            if self._variants > _MOST_VARIANTS:
                raise NotLinearError("it has too many characters in any case")
        return found

    def _category(self, name: str, flags: int) -> str:
        return f"a:{name}" if flags & self._parser.SRE_FLAG_ASCII else name

    def _number(self, found: _Class) -> int:
        number = self.classes.setdefault(found, len(self.classes))
        if number >= _MOST_CLASSES:
            raise NotLinearError(f"it has more than {_MOST_CLASSES} different characters and sets")
        return number


_UNKNOWN = {
    "ASSERT": "a lookahead",
    "ASSERT_NOT": "a negative lookahead",
    "FAILURE": "a negative lookahead",
    "GROUPREF": "a backreference",
    "GROUPREF_IGNORE": "a backreference",
    "GROUPREF_EXISTS": "a condition on a group",
    "ATOMIC_GROUP": "an atomic group",
    "POSSESSIVE_REPEAT": "a possessive quantifier",
}


def _alike(low: int, high: int, ascii_only: bool) -> set[int]:
    variants = case_variants()
    high = min(high, _LAST_ASCII) if ascii_only else high  # other letters have no case then
    codes = variants.keys() & range(low, high + 1) if high - low < len(variants) else None
    if codes is None:
        codes = {code for code in variants if low <= code <= high}
    found = {other for code in codes for other in variants[code]}
    return {code for code in found if code <= _LAST_ASCII} if ascii_only else found


@dataclass(frozen=True, slots=True)
class _Alphabet:
    """The characters of one pattern as bytes."""

    classes: tuple[str, ...]
    """The classes of the pattern as RE2 reads them."""
    is_final: bool
    """True if only a line break at a text's end is one to RE2."""
    letters: _Letters
    first: bytes
    """The bytes of the first 256 code points."""

    def written(self, text: str) -> bytes:
        """Return a byte for each character."""
        try:
            data = text.encode("latin-1").translate(self.first)
        except UnicodeEncodeError:
            data = text.translate(self.letters).encode("latin-1")
        return data[:-1] + b"\n" if self.is_final and text.endswith("\n") else data


class _Letters(dict[int, str]):
    """The byte of each code point, as a character; remembers some."""

    def __init__(self, bounds: list[int], letters: list[int]) -> None:
        super().__init__()
        self._bounds = bounds
        self._letters = letters

    def __missing__(self, code: int) -> str:
        letter = chr(self._letters[bisect_right(self._bounds, code) - 1])
        if len(self) < _REMEMBERED:
            self[code] = letter
        return letter


def _alphabet(writer: _Writer) -> _Alphabet:
    """Return the bytes for all characters: the same for those that no class tells apart.

    Raises:
        NotLinearError: there aren't enough.
    """
    classes, word, is_final = [*writer.classes], writer.word, writer.is_final
    ranges = {each: _ranges(each) for _, members in classes for each in members}
    bounds = sorted({0, *(at for runs in ranges.values() for a, b in runs for at in (a, b + 1))})
    if bounds[-1] > LAST:
        bounds.pop()
    place = {bound: index for index, bound in enumerate(bounds)} | {LAST + 1: len(bounds)}
    count = len(bounds)
    every = (1 << count) - 1

    def mask(each: Any) -> int:
        found = sum((1 << place[b + 1]) - (1 << place[a]) for a, b in ranges[each])
        return every ^ found if isinstance(each, str) and each.startswith("!") else found

    masks = {each: mask(each) for each in ranges}
    held: list[str] = []
    for negated, members in classes:
        bits = 0
        for each in members:
            bits |= masks[each]
        held.append(format(every ^ bits if negated else bits, f"0{count}b")[::-1])
    signs = [*zip(*held, strict=True)]
    at_word = classes.index((False, frozenset({word}))) if word is not None else None
    # Neighbours for the classes that the program holds most often: each is one range then.
    frequent = [number for number, _ in writer.copies.most_common()]
    ordered = sorted({*signs}, key=lambda sign: [sign[number] for number in frequent])
    letters = _letters_of(ordered, at_word)
    if is_final:
        letters[signs[place[_NEWLINE]]] = _INNER_NEWLINE
    written = [
        _class_of({letter for sign, letter in letters.items() if sign[number] == "1"}, is_final)
        for number in range(len(classes))
    ]
    mapping = _Letters(bounds, [letters[sign] for sign in signs])
    first = bytes(ord(mapping[code]) for code in range(256))
    return _Alphabet(tuple(written), is_final, mapping, first)


def _ranges(member: Any) -> tuple[Range, ...]:
    return categories()[member.removeprefix("!")] if isinstance(member, str) else (member,)


def _letters_of(signs: list[tuple[str, ...]], at_word: int | None) -> dict[tuple[str, ...], int]:
    """Return a byte for each of the sets of characters; the first class is the line break's."""
    words, others = [*_WORD_BYTES], [*_OTHER_BYTES]
    if at_word is not None:
        others = [byte for byte in others if byte not in _WORD_BYTES]
    letters: dict[tuple[str, ...], int] = {}
    for sign in signs:
        pool = words if at_word is not None and sign[at_word] == "1" else others
        if sign[0] == "1":
            letters[sign] = _NEWLINE
        elif not pool:
            raise NotLinearError("it tells too many characters apart")
        else:
            letters[sign] = pool.pop(0)
    return letters


def _class_of(letters: set[int], is_final: bool) -> str:
    if is_final and _INNER_NEWLINE in letters:
        letters = {*letters, _NEWLINE}
    runs: list[list[int]] = []
    for letter in sorted(letters):
        if runs and runs[-1][1] == letter - 1:
            runs[-1][1] = letter
        else:
            runs.append([letter, letter])
    text = "".join(rf"\x{low:02x}-\x{high:02x}" for low, high in runs)
    return f"[{text}]" if text else r"[^\x00-\xff]"
