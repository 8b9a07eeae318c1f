"""The policy that keeps injected instructions from the model."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from operator import contains
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from leyline_policies.builtin.detectors import Rule
from leyline_policies.builtin.patterns import PatternTimeoutError, compile_pattern
from leyline_policies.builtin.search import Search
from leyline_policies.context import Context
from leyline_policies.conversation import RESULT_ROLES, text_of
from leyline_policies.errors import did_you_mean, shown
from leyline_policies.kinds import Pattern
from leyline_policies.policy import Message, Mode
from leyline_policies.verbs import is_annotated, is_condemned, quarantined

_GAP = r"(?>(?:[\s\"'*_]|\\[nrt]){1,8})"  # between words, also as JSON writes it
_WORD = rf"(?>\w{{1,20}}){_GAP}"
_WHOSE = rf"(?:(?:all|any|the|your|my|of|these|those|every){_GAP}){{0,4}}"
_BEFORE = r"(?:previous|prior|above|earlier|preceding|existing|original|system)"
_ORDERS = r"(?:instructions?|prompts?|rules|guidelines|directions?|directives?|context|messages?)"
_SECRETS = (
    r"(?:system prompt|conversation|chat history|api[ _-]?keys?|credentials|passwords?|secrets?|"
    r"tokens?|environment variables|\.env|private keys?|ssh keys?)"
)
RULES: Mapping[str, str] = MappingProxyType(
    {
        "override": rf"(?i)\b(?:ignore|disregard|forget|override|bypass){_GAP}{_WHOSE}"
        rf"{_BEFORE}{_GAP}(?:{_WORD})?{_ORDERS}\b",
        "new_instructions": rf"(?i)\b(?:new|updated|revised|real|actual|important){_GAP}"
        rf"(?:system{_GAP})?(?:instructions?|prompt){_GAP}(?:for{_GAP}(?:you|the{_GAP}"
        rf"(?:ai|assistant|agent|model)))|\byou{_GAP}are{_GAP}no{_GAP}longer{_GAP}(?:an?{_GAP})?"
        rf"(?:{_WORD})?(?:ai|assistant|agent|model)\b",
        "role_tokens": r"<\|(?:im_start|im_end|start_header_id|end_header_id|eot_id|system|"
        r"[Aa]ssistant|[Uu]ser|endoftext|channel|message)\|>|<<SYS>>|\[/?INST\]",
        "conceal": rf"(?i)\b(?:do{_GAP}not|don'?t|never|without){_GAP}"
        rf"(?:tell(?:ing)?|inform(?:ing)?|mention(?:ing)?|reveal(?:ing)?|alert(?:ing)?|"
        rf"notify(?:ing)?){_GAP}(?:(?:this|it|that|anything){_GAP})?(?:to{_GAP})?the{_GAP}user\b",
        "exfiltrate": rf"(?i)\b(?:send|post|upload|e-?mail|forward|exfiltrate|leak){_GAP}"
        rf"(?:{_WORD}){{0,4}}?{_SECRETS}{_GAP}(?:{_WORD}){{0,3}}?(?:to|at)\b",
        "hidden_text": r"[\U000E0020-\U000E007E]{4,}",
    }
)
"""Forms of injected instructions, by name.

- ``override``: telling the reader to ignore the instructions before;
- ``new_instructions``: announcing new ones to the model, or that it is another now;
- ``role_tokens``: tokens by which chat templates mark the speaker;
- ``conceal``: asking to keep something from the user;
- ``exfiltrate``: asking to send keys, the prompt or the conversation somewhere;
- ``hidden_text``: words in invisible tag characters.

A pattern sees known phrases, not intent: it is one fence, not the wall. Texts that speak of such
attacks match as well.
"""
_INVISIBLE = "\u00ad\u200b\u200c\u200d\u2060\ufeff"
_SAID = "leyline"
_ALLOW = "allow"
_OWN = "pattern"
_VERDICT = "verdict"
_TIMEOUT = "timeout"


@dataclass(frozen=True, slots=True)
class Quarantine:
    """Keep tool results that try to instruct the model from reaching it.

    A result that one of the ``rules`` (all by default; see `RULES`) or of the regular expressions
    in ``patterns`` matches becomes a line that names the rule, before the model has read it, and is
    forgotten where it has. With ``tools`` only results of these tools are searched. Letters are
    compared in their compatible forms, without invisible ones in between.

    A caller's own verdict comes first: a message with ``"leyline": {"verdict": "quarantine"}`` is
    removed whatever it says (any message but the instructions), one with ``"allow"`` stays.

    A result that takes too long to search is removed; with ``on_timeout="fail"`` the policy fails
    for the turn instead, which refuses the request unless the operator chose otherwise
    (``on_fault``).
    """

    name: ClassVar[str] = "quarantine"
    mode: ClassVar[Mode] = "forget"
    trusted: ClassVar[bool] = True

    rules: tuple[str, ...] = tuple(RULES)
    patterns: tuple[Pattern, ...] = field(default=(), repr=False)
    tools: tuple[str, ...] | None = None
    on_timeout: Literal["withhold", "fail"] = "withhold"
    _rules: tuple[Rule, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Raise ValueError for an unknown rule or an unusable pattern."""
        for rule in self.rules:
            if rule not in RULES:
                raise ValueError(
                    f"rules: {shown(rule)} is unknown{did_you_mean(rule, RULES) or ';'} "
                    f"(known: {', '.join(RULES)})"
                )
        if self.on_timeout not in ("withhold", "fail"):
            raise ValueError(f"on_timeout={self.on_timeout} must be withhold or fail")
        if self.tools is not None and not self.tools:
            raise ValueError("tools=[] names no tool; leave it out to look at the results of all")
        own = map(Rule.of_user, map(compile_pattern, self.patterns))
        rules = (*(Rule.of(RULES[rule]) for rule in self.rules), *own)
        object.__setattr__(self, "_rules", rules)

    def transform(self, messages: list[Message], turn_idx: int, context: Context) -> list[Message]:
        """Return the messages with stubs for those in quarantine. Raises PatternTimeoutError."""
        look = partial(self._look, search=Search(self._rules))
        known = context.each(messages, look, "found")
        if not context.any(messages, is_annotated, "said") and not any(known):
            return messages
        looked_at = self._results(messages, context)
        edited: list[Message] | None = None
        for index, message in enumerate(messages):
            found = _verdict(message) if _SAID in message else None
            if found is None and index in looked_at:
                found = known[index]
            if found is None or found == _ALLOW:
                continue
            stubbed = context.once(message, _Stub(found), ("stub", found))
            if stubbed is not message:
                edited = list(messages) if edited is None else edited
                edited[index] = stubbed
        return messages if edited is None else edited

    def _results(self, messages: list[Message], context: Context) -> set[int]:
        """Return the places of the results to search."""
        if self.tools is None:
            return set(context.results(messages))
        calls = context.calls(messages)
        named = {index: call.name for call in calls for index in call.results}
        return {
            index
            for index in context.results(messages)
            if named.get(index, messages[index].get("name")) in self.tools
        }

    def _look(self, message: Message, search: Search) -> str | None:
        """Return the name of the rule that puts the message into quarantine."""
        if message.get("role") not in RESULT_ROLES:
            return None
        search.begin()
        try:
            place = search.first(plain(text_of(message)))
        except PatternTimeoutError:
            if self.on_timeout == "fail":
                raise
            return _TIMEOUT
        return None if place is None else (*self.rules, *(_OWN for _ in self.patterns))[place]


def plain(text: str) -> str:
    """Return the text in compatible letters, without invisible ones."""
    if text.isascii():
        return text
    if any(map(contains, repeat(text), _INVISIBLE)):
        text = text.translate(dict.fromkeys(map(ord, _INVISIBLE)))
    return unicodedata.normalize("NFKC", text)


def _verdict(message: Message) -> str | None:
    """Return the caller's verdict on the message."""
    if is_condemned(message):
        return _VERDICT
    noted: Any = message.get(_SAID)
    return _ALLOW if isinstance(noted, dict) and noted.get("verdict") == _ALLOW else None


@dataclass(frozen=True, slots=True)
class _Stub:
    """A message with a line in place of its content."""

    rule: str

    def __call__(self, message: Message) -> Message:
        return quarantined(message, self.rule)
