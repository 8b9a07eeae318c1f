"""Named detectors of keys and personal data, for `redact`.

Keys, tokens and passwords are those of a catalogue of rules (`catalogue`), with JSON Web Tokens and
private keys, which need more than a rule there. Numbers are checked by their check digits
(python-stdnum), telephone numbers by the numbering plans (phonenumbers). These two packages come
with the extra ``detectors`` and are imported when a policy that needs them is built.

The text is anybody's: every pattern takes time in proportion to it, whatever it says, and a test
checks that. Where a run of characters may hold many beginnings, it is read once: by possessive
quantifiers, or by a lookahead at the start of the run that fails if none can match.
"""

from __future__ import annotations

import importlib
import ipaddress
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from operator import contains
from typing import Any

from leyline_policies.builtin.catalogue import CHECKS, SECRET, KeyRule, load_catalogue
from leyline_policies.builtin.patterns import Match, UserPattern
from leyline_policies.errors import did_you_mean, shown

Clues = tuple[str, ...]
_ENOUGH = 8
_PLANE = 0xFFFF


def clues_of(pattern: str) -> Clues | None:
    """Return texts of which any match contains one, case aside (small letters here).

    None if the pattern requires no text in particular.
    """
    # The parser of `re` has no public name, but only it knows how patterns are built.
    parser = importlib.import_module("re._parser")
    return _of_sequence(parser.parse(pattern), parser)


def _of_sequence(items: Any, parser: Any) -> Clues | None:
    """Return the best clues of one of the items: the longer they are, the fewer texts have them."""
    found: list[Clues] = []
    letters = ""
    for kind, argument in items:
        if letter := _letter(kind, argument, parser):
            letters += letter
            continue
        if letters:
            found.append((letters,))
        letters = ""
        clues = _of_item(kind, argument, parser)
        if clues is not None:
            found.append(clues)
    if letters:
        found.append((letters,))
    return max(found, key=lambda clues: (min(map(len, clues)), -len(clues)), default=None)


def _of_item(kind: Any, argument: Any, parser: Any) -> Clues | None:
    repeats = (parser.MAX_REPEAT, parser.MIN_REPEAT, parser.POSSESSIVE_REPEAT)
    if kind is parser.SUBPATTERN:
        return _of_sequence(argument[-1], parser)
    if kind is parser.ATOMIC_GROUP:
        return _of_sequence(argument, parser)
    if kind in repeats and argument[0] > 0:
        least, _, repeated = argument
        letters = [_letter(inner, value, parser) for inner, value in repeated]
        if all(letters):
            return ("".join(letters * min(int(least), _ENOUGH)),)
        return _of_sequence(repeated, parser)
    if kind is parser.BRANCH:
        ways = [_of_sequence(way, parser) for way in argument[1]]
        if all(ways):
            return tuple(dict.fromkeys(clue for way in ways for clue in way or ()))
    return None


def _letter(kind: Any, argument: Any, parser: Any) -> str:
    """Return the text that the item always matches, in small letters (`search.in_small_letters`).

    Empty if it may differ.
    """
    if kind is parser.LITERAL and chr(argument).isascii():
        return chr(argument).lower()
    if kind is parser.IN:
        lows = [low for each, members in argument if (low := _lowest(each, members, parser))]
        # No letter outside the plane has an ASCII letter for its other case.
        if len(lows) == len(argument) and min(lows) > _PLANE:
            return "?"
    return ""


def _lowest(kind: Any, members: Any, parser: Any) -> int | None:
    if kind is parser.RANGE:
        return int(members[0])
    return int(members) if kind is parser.LITERAL else None


_MEANT = "meant"
Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Rule:
    """A search: a group of a pattern, and the parts of it that are meant (all, if None)."""

    pattern: UserPattern
    group: int | str = 0
    narrow: Callable[[str], Iterable[Span]] | None = None
    clues: Clues | None = None
    """Texts of which any match contains one, case aside (small letters here); None if unknown. A
    search for them is faster than a match."""

    @classmethod
    def of(
        cls,
        pattern: str,
        group: int | str = 0,
        narrow: Callable[[str], Iterable[Span]] | None = None,
    ) -> Rule:
        """Return a rule with its clues; a group ``meant`` is the meant part of the match."""
        return cls(UserPattern(pattern), _meant(pattern, group), narrow, clues_of(pattern))

    @classmethod
    def of_user(cls, pattern: UserPattern) -> Rule:
        """Return a rule of a setting's pattern. RE2 looks for clues itself."""
        clues = None if pattern.linear is not None else clues_of(pattern.text)
        return cls(pattern, _meant(pattern.text, 0), clues=clues)

    def may_match(self, text: str) -> bool:
        """Return True if a text, given in small letters, is worth matching."""
        return self.clues is None or any(map(contains, repeat(text), self.clues))

    def spans(self, found: Match) -> Iterator[Span]:
        """Yield the spans of the searched text to remove for a match."""
        start, end = found.span(self.group)
        if start < 0:
            start, end = found.span()
        if self.narrow is None:
            yield start, end
            return
        for first, last in self.narrow(found.group()[start - found.start() : end - found.start()]):
            yield start + first, start + last


def _meant(pattern: str, group: int | str) -> int | str:
    return _MEANT if f"(?P<{_MEANT}>" in pattern else group


_LINE = r"(?>\r?\n|\\++(?:r\\*+)?n)"  # also as it is written inside JSON
_BEGIN = r"-----BEGIN[A-Z0-9 ]{0,40} PRIVATE KEY(?: BLOCK)?-----"
_END = r"-----END[A-Z0-9 ]{0,40} PRIVATE KEY(?: BLOCK)?-----"
_BODY = r"""(?:[A-Za-z0-9+/=:,.() \t\r\n\\"'`|>#*_;<]|-(?!----))*+"""
_JSON = "e(?:yJ|yA|wo|w0|wk)"  # the beginning of an object in base64, with space or without
_HEADER = r"[A-Za-z-]{1,40}+: [^\n\\]*+"
# Text that a diff, a quotation, a numbered listing or a program puts before a line.
_MARGIN = r"""(?:[ \t]{0,40}+(?:\d{1,6}+[:|\t ])?+[ \t"'`|>#*+]{0,12}+)"""
# The same, read from its end.
_BEFORE = r"""[+-]?(?:[ \t]{0,40}\d{1,6}[:|\t ]{1,4})?[ \t"'`|>#*+]{0,12}"""
_B64 = "[A-Za-z0-9+/]"
# The beginnings, in base64, of a private key: in DER of PKCS #1, #8 and SEC 1, in OpenSSH's form,
# and, as kubeconfig files and secrets of Kubernetes have them, of the line BEGIN itself.
_IN_BASE64 = (
    r"MII[A-Za-z0-9+/]{3}IBA(?:AKC|DANBgkqhkiG9w0BAQEFAASC)|MHcCAQEEI|MIGHAgEAMBMGByqGSM49"
    r"|MC4CAQAwBQYDK2VwBCIEI|b3BlbnNzaC1rZXktdjEA"
    r"|LS0tLS1CRUdJTi(?:BQUklWQVRF|BSU0EgUFJJVkFUR|BFQyBQUklWQVRF|BEU0EgUFJJVkFUR"
    r"|BPUEVOU1NIIFBSSVZBVE|BFTkNSWVBURUQgUFJJVkFUR|BQR1AgUFJJVkFUR)"
)
_WHOLE_LINE = rf"(?m:^){_BEFORE}{_B64}{{40,}}={{0,2}}\r?\n"
_LAST_LINE = rf"(?m:^){_BEFORE}=?{_B64}{{4,}}={{0,2}}\r?\n"
_OWN: dict[str, tuple[str, ...]] = {
    "jwt": (
        rf"(?<![\w-])(?=[\w-]*+\.{_JSON}[\w-]{{8,}}+\.[\w-]{{8}})"
        rf"[\w-]*?\b(?P<{_MEANT}>{_JSON}[\w-]{{8,}}+\.{_JSON}[\w-]{{8,}}+\.[\w-]{{8,}}+)",
    ),
    "private_key": (
        rf"{_BEGIN}{_BODY}{_END}",
        # Cut off before its end: up to the last line that may belong to it.
        rf"{_BEGIN}(?:(?:{_LINE}{_MARGIN})++(?:[A-Za-z0-9+/=]{{16,}}+|{_HEADER}))*+",
        # Cut off at its beginning: from the first line that may belong to it.
        rf"(?<=(?P<{_MEANT}>(?:{_B64}{{40,}}\r?\n)?(?:{_WHOLE_LINE}){{0,400}}(?:{_LAST_LINE}){{0,2}}"
        rf"(?m:^){_BEFORE})){_END}",
        rf"\b(?:{_IN_BASE64}){_B64}{{16,}}+={{0,2}}(?:{_LINE}{_MARGIN}{_B64}{{48,}}+={{0,2}})*+"
        rf"(?:{_LINE}{_MARGIN}{_B64}{{2,}}+={{1,2}})?+",
    ),
}


def _credit_card(region: str | None) -> Iterator[Rule]:
    luhn = _imported("stdnum.luhn", "credit_card")

    def valid(text: str) -> Iterator[Span]:
        if luhn.is_valid(text.replace(" ", "").replace("-", "")):
            yield 0, len(text)

    # Forbidden text before a match is tested after the first digits: that finds it much faster.
    lone = r"(?<![\d.]\d{4})"
    groups = r"([ -])\d{4}\1\d{4}\1\d{1,4}(?:\1\d{1,3})?|([ -])\d{6}\2\d{4,5}"
    yield Rule.of(rf"[2-6]\d{{3}}{lone}(?:\d{{9,15}}|{groups})(?!\d)", narrow=valid)


def _email(region: str | None) -> Iterator[Rule]:
    def personal(text: str) -> Iterator[Span]:
        if not text.startswith("git@"):  # the beginning of a clone's address is no person's
            yield 0, len(text)

    label = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
    yield Rule.of(
        rf"(?<![\w.+%-])[\w.+%-]{{0,63}}[\w+]@(?:{label}\.){{1,8}}[A-Za-z]{{2,24}}\b",
        narrow=personal,
    )


def _iban(region: str | None) -> Iterator[Rule]:
    iban = _imported("stdnum.iban", "iban")

    def valid(text: str) -> Iterator[Span]:
        # In print, the next word may look like one more group.
        end = len(text)
        while end > 0 and not iban.is_valid(text[:end], check_country=False):
            end = text.rfind(" ", 0, end)
        if end > 0:
            yield 0, end

    shape = r"[A-Z]{2}\d{2}(?:[A-Z0-9]{11,30}|(?: [A-Z0-9]{4}){2,7}(?: [A-Z0-9]{1,3})?)"
    yield Rule.of(rf"\b{shape}\b", narrow=valid)


def _ip_address(region: str | None) -> Iterator[Rule]:
    def of_a_host(text: str) -> Iterator[Span]:
        if len(text) < 7:  # "2::4" is a slice of a list more often than a host
            return
        try:
            address = ipaddress.ip_address(text)
        except ValueError:
            return
        if not (address.is_loopback or address.is_unspecified):
            yield 0, len(text)

    v4 = r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?!\.?\w)"
    mapped = r"(?:(?:\d{1,3}\.){3}\d{1,3})?"
    hexes = "[0-9A-Fa-f]"
    v6 = rf"(?<![\w:.])(?:{hexes}{{0,4}}:){{2,8}}(?:{hexes}{{1,4}}|{mapped})(?![\w:]|\.\d)"
    yield Rule.of(v4, narrow=of_a_host)
    yield Rule.of(v6, narrow=of_a_host)


def _phone(region: str | None) -> Iterator[Rule]:
    phonenumbers = _imported("phonenumbers", "phone")
    if region is not None and region not in phonenumbers.SUPPORTED_REGIONS:
        raise ValueError(f"phone_region={region[:20]} is no two-letter region such as US")

    def dialled(text: str) -> Iterator[Span]:
        for found in phonenumbers.PhoneNumberMatcher(text, region):
            yield found.start, found.end

    begin = r"(?<![\w+])\+" if region is None else r"(?<![\w+.-])[+(]{0,2}"
    yield Rule.of(rf"{begin}\d[\d ()./-]{{5,22}}\d(?!\w)", narrow=dialled)


def _us_ssn(region: str | None) -> Iterator[Rule]:
    ssn = _imported("stdnum.us.ssn", "us_ssn")

    def valid(text: str) -> Iterator[Span]:
        if ssn.is_valid(text.replace(" ", "-")):
            yield 0, len(text)

    yield Rule.of(r"(?<![\w-])\d{3}([ -])\d{2}\1\d{4}(?![\w-])", narrow=valid)


_PERSONAL: dict[str, Callable[[str | None], Iterator[Rule]]] = {
    "credit_card": _credit_card,
    "email": _email,
    "iban": _iban,
    "ip_address": _ip_address,
    "phone": _phone,
    "us_ssn": _us_ssn,
}
_CATALOGUE = load_catalogue()
KEYS = tuple(sorted({*_OWN, *(rule.kind for rule in _CATALOGUE)}))
"""Detectors of keys, tokens and passwords; together they are called ``keys``."""
PII = tuple(sorted(_PERSONAL))
"""Detectors of personal data; together they are called ``pii``."""
_GROUPS = {"keys": KEYS, "pii": PII}


def load_detectors(names: Sequence[str], phone_region: str | None = None) -> tuple[Rule, ...]:
    """Return the rules of the named detectors or groups of detectors.

    Raises:
        ValueError: an unknown name or region, or a package that isn't installed.
    """
    known = (*KEYS, *PII, *_GROUPS)
    wanted: dict[str, None] = {}
    for name in names:
        if name not in known:
            raise ValueError(
                f"detectors: {shown(name)} is unknown{did_you_mean(name, known) or ';'} "
                f"(known: {', '.join(known)})"
            )
        wanted.update(dict.fromkeys(_GROUPS.get(name, (name,))))
    return tuple(rule for name in wanted for rule in _rules(name, phone_region))


def _rules(name: str, phone_region: str | None) -> Iterator[Rule]:
    if name in _PERSONAL:
        yield from _PERSONAL[name](phone_region)
        return
    for text in _OWN.get(name, ()):
        yield Rule.of(text)
    for each in _CATALOGUE:
        if each.kind == name:
            yield _of_catalogue(each)


def _of_catalogue(rule: KeyRule) -> Rule:
    text, check = rule.expression, CHECKS[rule.check] if rule.check else None
    group = SECRET if f"(?P<{SECRET}>" in text else 0
    if rule.surroundings is not None:
        return Rule.of(rule.surroundings, 0, partial(_inside, re.compile(text), group, check))
    return Rule.of(text, group, None if check is None else partial(_checked, check))


def _checked(check: Callable[[str], bool], text: str) -> Iterator[Span]:
    if check(text):
        yield 0, len(text)


def _inside(
    pattern: re.Pattern[str], group: int | str, check: Callable[[str], bool] | None, text: str
) -> Iterator[Span]:
    for found in pattern.finditer(text):
        if check is None or check(found.group(group)):
            yield found.span(group)


def _imported(module: str, detector: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = _PACKAGES[module.partition(".")[0]]
        raise ValueError(
            f"detectors: {detector} needs the package {package}, which is not installed; "
            f"pip install {package}"
        ) from error


_PACKAGES = {
    "phonenumbers": "phonenumbers",
    "stdnum": "python-stdnum",
}
