"""Named detectors of keys and personal data, for `redact`.

Shapes of keys are those of detect-secrets, with our own where its last release (1.5, 2024) knows
only part of a key or nothing of it. Numbers are checked by their check digits (python-stdnum),
telephone numbers by the numbering plans (phonenumbers). These packages come with the extra
``detectors`` and are imported when a policy that needs them is built.

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
from itertools import repeat
from operator import contains
from typing import Any

from leyline_policies.builtin.clues import Clues, clues_of
from leyline_policies.builtin.patterns import Match, UserPattern
from leyline_policies.errors import did_you_mean, shown

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


# From the plugins of detect-secrets: module and class, and the group that is the secret.
_PLUGINS: dict[str, tuple[str, str, int]] = {
    "aws_key": ("aws", "AWSKeyDetector", 1),
    "azure_storage_key": ("azure_storage_key", "AzureStorageKeyDetector", 0),
    "basic_auth": ("basic_auth", "BasicAuthDetector", 1),
    "discord_token": ("discord", "DiscordBotTokenDetector", 0),
    "github_token": ("github_token", "GitHubTokenDetector", 0),
    "gitlab_token": ("gitlab_token", "GitLabTokenDetector", 0),
    "mailchimp_key": ("mailchimp", "MailchimpDetector", 0),
    "pypi_token": ("pypi_token", "PypiTokenDetector", 0),
    "sendgrid_key": ("sendgrid", "SendGridDetector", 0),
    "slack_token": ("slack", "SlackDetector", 0),
    "square_secret": ("square_oauth", "SquareOAuthDetector", 0),
    "stripe_key": ("stripe", "StripeDetector", 0),
    "telegram_token": ("telegram_token", "TelegramBotTokenDetector", 0),
    "twilio_key": ("twilio", "TwilioKeyDetector", 0),
}
_LINE = r"(?>\r?\n|\\++(?:r\\*+)?n)"  # also as it is written inside JSON
_BEGIN = r"-----BEGIN[A-Z0-9 ]{0,40} PRIVATE KEY(?: BLOCK)?-----"
_END = r"-----END[A-Z0-9 ]{0,40} PRIVATE KEY(?: BLOCK)?-----"
_BODY = r"""(?:[A-Za-z0-9+/=:,.() \t\r\n\\"'`|>#*_;<]|-(?!----))*+"""
_HEADER = r"[A-Za-z-]{1,40}+: [^\n\\]*+"
# Text that a diff, a quotation, a numbered listing or a program puts before a line.
_MARGIN = r"""(?:[ \t]{0,40}+(?:\d{1,6}+[:|\t ])?+[ \t"'`|>#*+]{0,12}+)"""
_OWN: dict[str, tuple[str, ...]] = {
    "anthropic_key": (r"\bsk-ant-[\w-]{20,}+",),
    "github_token": (r"\bgithub_pat_\w{22,}+",),
    "google_api_key": (r"\bAIza[\w-]{35}", r"\bGOCSPX-[\w-]{20,}+"),
    "huggingface_token": (r"\bhf_[A-Za-z0-9]{30,}+",),
    "jwt": (
        r"(?<![\w-])(?=[\w-]*+\.eyJ[\w-]{8,}+\.[\w-]{8})"
        rf"[\w-]*?\b(?P<{_MEANT}>eyJ[\w-]{{8,}}+\.eyJ[\w-]{{8,}}+\.[\w-]{{8,}}+)",
    ),
    "npm_token": (rf"/:_authToken=\s{{0,8}}+(?P<{_MEANT}>npm_[\w.~+/=-]++|[A-Fa-f0-9-]{{36}})",),
    "openai_key": (
        r"\bsk-(?!ant-)(?=(?:[^\W\d]|-){0,80}+\d)(?=(?:[^\WA-Z]|-){0,80}+[A-Z])[\w-]{32,}+",
    ),
    "private_key": (
        rf"{_BEGIN}{_BODY}{_END}",
        # Cut off before its end: up to the last line that may belong to it.
        rf"{_BEGIN}(?:(?:{_LINE}{_MARGIN})++(?:[A-Za-z0-9+/=]{{16,}}+|{_HEADER}))*+",
    ),
    "slack_token": (r"\bxapp-\d-[\w-]{10,}+", r"\bxox[abeoprs]-[\w-]{20,}+"),
    "stripe_key": (r"\b[rs]k_(?:live|test)_[A-Za-z0-9]{20,}+", r"\bwhsec_[A-Za-z0-9+/=]{20,}+"),
}
_REST = r"[A-Za-z0-9_-]*"  # for keys longer than when their shape was recorded


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
KEYS = tuple(sorted({*_PLUGINS, *_OWN}))
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
    if name in _PLUGINS:
        module, plugin, group = _PLUGINS[name]
        loaded = _imported(f"detect_secrets.plugins.{module}", name)
        for pattern in getattr(loaded, plugin).denylist:
            yield _from_library(pattern, group)


def _from_library(pattern: re.Pattern[str], group: int) -> Rule:
    flags = "".join(sign for flag, sign in ((re.I, "i"), (re.X, "x")) if pattern.flags & flag)
    text = f"(?{flags})" if flags else ""
    if pattern.groups < group or group == 0:
        return Rule.of(f"{text}(?:{pattern.pattern}){_REST}")
    return Rule.of(text + pattern.pattern, group)


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
    "detect_secrets": "detect-secrets",
    "phonenumbers": "phonenumbers",
    "stdnum": "python-stdnum",
}
