"""The catalogue of keys, tokens and passwords: `keys/rules.toml`, which says where each is from."""

from __future__ import annotations

import base64
import binascii
import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from typing import Literal

SECRET = "secret"  # noqa: S105
"""The group of a pattern that is the secret, where there is more to the match."""

_BETWEEN_WORDS = "[_. -]?"
_QUOTES = r"""["'`\\]{0,4}"""
# After a name: which one it is, quotes, a value that a prompt shows.
_NUMBERED = r"(?:_(?:[0-9]{1,2}|(?i:prod|production|dev|staging|test|live|new|old)))?"
_TAIL = rf"{_NUMBERED}{_QUOTES}[\])]?(?: ?\[[^\[\]\s]{{0,24}}\])?"
# Then a sign, in code after a type; or `value:`, as in lists of names and values; or only a space.
_SIGN = r"\s{0,8}(?:(?::[ \t]{0,4}[A-Za-z]{1,12}[ \t]{0,4})?={1,3}>?|:=?|,|>)\s{0,8}"
_PAIR = rf"[ \t]{{0,4}},?[\s+>-]{{0,24}}{_QUOTES}(?i:value){_QUOTES}[ \t]{{0,4}}[:=]\s{{0,4}}"
_EQUALS = r"[ \t]{0,2}=[ \t]{0,2}"
_COLON = rf"{_QUOTES}[ \t]{{0,4}}:[ \t]{{0,4}}"
_OPEN = r"""["'`\\(]{0,6}"""
_SEPARATORS = {
    "any": rf"(?:{_SIGN}|{_PAIR}|[ \t]{{1,8}})",
    "sign": rf"(?:{_EQUALS}|{_COLON}|{_PAIR})",
}

_REFERENCE = re.compile(
    r"[$%@]\{?\{?[\w.\s:-]*\}{0,2}%?|\{\{?[^{}]*\}?\}|<[^<>]*>|\[[^\[\]]*\]|%\(?\w*\)?s|\$\(.*|`.*"
)
_PLACEHOLDER = re.compile(
    r"(?i)(?:your|my|the|some|example|sample|dummy|fake|placeholder|insert|replace|change|enter"
    r"|redacted|none|null|true|false|undefined|todo)(?:[_ .-]?(?:me|it|with|your|here|api|access"
    r"|auth|secret|private|key|token|password|pass|value|string)){0,8}"
    r"|passw(?:or)?d|pass|pwd|secret|token|key|[x*.:#?_-]+|(.)\1{5,}|\.{3}.*"
)
_PORT = re.compile(r"[0-9]{1,5}[/?#]")
_NUMBER = re.compile(r"[0-9][0-9_.,:e+-]*")
_CODE = re.compile(r"[A-Za-z_]\w*(?:\.\w+)+|(?:[A-Za-z]:)?[./~\\]?[/\\].*|https?:.*", re.DOTALL)
_CALL = re.compile(r"[(\[{]")
_FEWEST_LETTERS = 6


@dataclass(frozen=True, slots=True)
class KeyRule:
    """A rule of the catalogue.

    Args:
        kind: name of the detector that it belongs to.
        source: where its shape is from.
        pattern: matches the secret, or its group `SECRET` does
        within: if given, the text in which the pattern is searched, such as a command; or
        names: what the secret may be assigned to, and
        value: what it then looks like.
        upper: if true, the names are searched in capitals only.
        separator: if ``sign``, a space alone doesn't stand between a name and its value.
        check: name of a look at the secret after the match (`CHECKS`).
    """

    kind: str
    source: str
    pattern: str = ""
    within: str = ""
    names: tuple[str, ...] = ()
    value: str = ""
    upper: bool = False
    separator: Literal["any", "sign"] = "any"
    check: str = ""

    @property
    def expression(self) -> str:
        """The regular expression of the secret. Its classes are those of ASCII, as in RE2."""
        return f"(?a){self.pattern or self._assignment()}"

    @property
    def surroundings(self) -> str | None:
        """The regular expression of the text in which that is searched; None if it is any."""
        return f"(?a){self.within}" if self.within else None

    def _assignment(self) -> str:
        names = "|".join(name.replace("_", _BETWEEN_WORDS) for name in self.names)
        found = f"(?:{names})" if self.upper else f"(?i:{names})"
        separator = _SEPARATORS[self.separator]
        return rf"{found}{_TAIL}{separator}{_OPEN}(?P<{SECRET}>{self.value})"


def load_catalogue() -> tuple[KeyRule, ...]:
    """Return the rules of the catalogue, in its order."""
    text = files(__package__).joinpath("keys", "rules.toml").read_text(encoding="utf-8")
    return tuple(
        KeyRule(**{**rule, "names": tuple(rule.get("names", ()))})
        for rule in tomllib.loads(text)["rules"]
    )


def is_literal(text: str) -> bool:
    """Return True if it is a value itself: no reference such as ``$X``, and no placeholder."""
    return _REFERENCE.fullmatch(text) is None and _PLACEHOLDER.fullmatch(text) is None


def is_mixed(text: str) -> bool:
    """Return True if it has letters, digits and enough different ones for a random text."""
    return (
        any(map(str.isdigit, text))
        and any(map(str.isalpha, text))
        and len({*text}) >= _FEWEST_LETTERS
    )


def is_mixed_case(text: str) -> bool:
    """Return True if it has digits and both small letters and capitals."""
    return is_mixed(text) and text != text.lower() and text != text.upper()


def is_pair(text: str) -> bool:
    """Return True if it is a name and a password in base64."""
    plain = text.translate(str.maketrans("-_", "+/")).rstrip("=")
    try:
        decoded = base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True).decode()
    except (binascii.Error, ValueError):
        return False
    return ":" in decoded and decoded.isprintable()


def is_userinfo(text: str) -> bool:
    """Return True if what follows ``://host:`` is a password rather than a port and a path."""
    return is_literal(text) and _PORT.match(text) is None


def is_password(text: str) -> bool:
    """Return True if it is a value that looks chosen or random, not a number, a call or a path."""
    if not is_literal(text) or _CALL.search(text):
        return False
    if _NUMBER.fullmatch(text) or _CODE.fullmatch(text):
        return False
    return any(not each.isalpha() and each not in "_-." for each in text)


def is_random(text: str) -> bool:
    """Return True if it looks chosen or random, and has digits, small letters and capitals."""
    return is_password(text) and is_mixed_case(text)


CHECKS: dict[str, Callable[[str], bool]] = {
    "literal": is_literal,
    "mixed": is_mixed,
    "mixed_case": is_mixed_case,
    "pair": is_pair,
    "password": is_password,
    "random": is_random,
    "userinfo": is_userinfo,
}
"""Looks at a secret after its match, by the names that rules have for them."""
