"""The policy that removes secrets from the history."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from leyline_policies.builtin.detectors import Rule, Span, load_detectors
from leyline_policies.builtin.patterns import PatternTimeoutError, compile_pattern
from leyline_policies.builtin.search import Search
from leyline_policies.builtin.texts import TextWalk, is_media, whole
from leyline_policies.context import Context
from leyline_policies.errors import did_you_mean, shown
from leyline_policies.kinds import Pattern
from leyline_policies.policy import Message, Mode

MAX_REPLACEMENT = 200
"""Maximum length of a replacement: a text may hold very many matches."""

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")


@dataclass(frozen=True, slots=True)
class Redact:
    """Replace what patterns match and detectors find, and make the model forget it.

    ``pattern`` and ``patterns`` are regular expressions; ``detectors`` names kinds of keys and
    personal data (`leyline_policies.builtin.detectors`; ``keys`` and ``pii`` are all of a kind).
    ``phone_region`` (US, DE, …) makes the detector ``phone`` find numbers without a country code.

    Every text of a message is searched, as it is written and as it reads with its escapes undone:
    string contents, text parts (also across their ends), reasoning, refusals, the arguments of tool
    calls (inside their JSON strings, which stay valid JSON), and the values of keys that Leyline
    does not know: texts, numbers and the names of members. Roles, ids, names of tools and media
    data stay. ``replacement`` is taken literally. With ``roles`` only messages of these roles are
    searched.

    A message that takes too long to search is withheld: all its texts become the replacement. With
    ``on_timeout="fail"`` the policy fails for the turn instead, which refuses the request unless
    the operator chose otherwise (``on_fault``).
    """

    name: ClassVar[str] = "redact"
    mode: ClassVar[Mode] = "forget"
    trusted: ClassVar[bool] = True

    pattern: Pattern | None = field(default=None, repr=False)
    replacement: str = "[redacted]"
    roles: tuple[str, ...] | None = None
    patterns: tuple[Pattern, ...] = field(default=(), repr=False)
    detectors: tuple[str, ...] = ()
    phone_region: str | None = None
    on_timeout: Literal["withhold", "fail"] = "withhold"
    _rules: tuple[Rule, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Raise ValueError for an unusable pattern, detector, replacement or role."""
        own = self.patterns if self.pattern is None else (self.pattern, *self.patterns)
        if not own and not self.detectors:
            raise ValueError("nothing to look for; give pattern, patterns or detectors")
        rules = (*map(_own_rule, own), *load_detectors(self.detectors, self.phone_region))
        object.__setattr__(self, "_rules", rules)
        if len(self.replacement) > MAX_REPLACEMENT:
            raise ValueError(f"replacement has more than {MAX_REPLACEMENT} characters")
        if self.on_timeout not in ("withhold", "fail"):
            raise ValueError(f"on_timeout={self.on_timeout} must be withhold or fail")
        for role in self.roles or ():
            if role not in _ROLES:
                raise ValueError(
                    f"roles: {shown(role)} is no role{did_you_mean(role, _ROLES) or ';'} "
                    f"(known: {', '.join(_ROLES)})"
                )
        if self.roles is not None and not self.roles:
            raise ValueError("roles=[] names no role; leave it out to search all")

    def transform(
        self, messages: list[Message], turn_idx: int, context: Context | None = None
    ) -> list[Message]:
        """Return the messages with every match replaced. Raises PatternTimeoutError."""
        context = context or Context()
        search = Search(self._rules)
        walk = TextWalk(lambda text: search.spans(text, self.replacement), self.replacement)

        def redacted(message: Message) -> Message:
            if self.roles is not None and message.get("role") not in self.roles:
                return message
            search.begin()
            try:
                return walk.message(message)
            except PatternTimeoutError:
                if self.on_timeout == "fail":
                    raise
                return withheld(message, self.replacement)

        edited = context.each(messages, redacted)
        return messages if edited == messages else edited

    def found_in(self, message: Message) -> frozenset[str]:
        """Return the text to replace in ``message``; all of a message that takes too long."""
        search, found = Search(self._rules), set[str]()

        def collect(text: str) -> Sequence[Span]:
            found.update(text[start:end] for start, end in search.spans(text, self.replacement))
            return ()

        try:
            TextWalk(collect, self.replacement).message(message)
        except PatternTimeoutError:
            return frozenset({repr(message)})
        return frozenset(found)


def withheld(message: Message, replacement: str) -> Message:
    """Return the message with ``replacement`` in place of every text."""
    edited = TextWalk(whole, replacement, joins=False).message(message)
    content = edited.get("content")
    if edited is not message and isinstance(content, list):
        # A picture whose address was replaced is no picture either.
        edited["content"] = [
            {"type": "text", "text": replacement} if new != old and is_media(new) else new
            for old, new in zip(message["content"], content, strict=True)
        ]
    return edited


def _own_rule(pattern: str) -> Rule:
    compiled = compile_pattern(pattern)
    try:
        empty = compiled.matches_nothing()
    except PatternTimeoutError as error:
        raise ValueError(f"pattern={shown(pattern)} takes too long on no text") from error
    if empty:
        raise ValueError(f"pattern={shown(pattern)} matches empty text everywhere")
    return Rule.of_user(compiled)
