"""Patterns that RE2 matches: the same matches as by `regex`, in time in proportion to the text."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st

from leyline_policies import Message, SpecError, load_pipeline
from leyline_policies.allowance import MAX_PATTERNS, Allowance
from leyline_policies.builtin.drop_failed_calls import DropFailedCalls
from leyline_policies.builtin.linear_pattern import (
    MAX_WORK,
    NotLinearError,
    case_variants,
    linear_pattern,
)
from leyline_policies.builtin.patterns import PatternTimeoutError, UserPattern, compile_pattern
from leyline_policies.builtin.quarantine import Quarantine
from leyline_policies.builtin.redact import Redact
from leyline_policies.builtin.remove_regex import RemoveRegex

CHARACTERS = "abc1 \n_-éßKk\u212aiIıİàÀs\u017f²٣\u2003😀\ud800"
_SETS = ("[ab]", "[^a]", "[^\\n]", "[a-c1]", r"[^\W\d]", r"[\s\w]", "[à-ÿ]", r"[\D-]")
_ATOMS = st.sampled_from([*"abc1_iKé😀.", *(f"\\{letter}" for letter in "nwWdDsS"), *_SETS])
_ANCHORS = st.sampled_from([r"\b", r"\B", "^", "$", r"\A", r"\Z"])
_TIMES = st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "*?", "+?", "{2,}", "{1,2}?"])
_PIECES = st.recursive(
    st.one_of(_ATOMS, _ATOMS, st.tuples(_ATOMS, _TIMES).map("".join)),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda two: f"(?:{two[0]}|{two[1]})"),
        st.tuples(_ANCHORS, inner).map("".join),
        st.tuples(inner, _ANCHORS).map("".join),
        # What may be empty isn't repeated: the engines differ about an empty round.
        st.tuples(_ATOMS, inner, _TIMES).map(lambda three: "(?:{}{}){}".format(*three)),
    ),
    max_leaves=6,
)
_FLAGS = st.sampled_from(["", "", "(?i)", "(?s)", "(?m)", "(?a)", "(?ims)", "(?ai)"])


@given(st.tuples(_FLAGS, _PIECES).map("".join), st.lists(st.text(CHARACTERS, max_size=12)))
def test_both_engines_find_the_same(pattern: str, texts: list[str]) -> None:
    """Places of all matches are equal, in any script, for every pattern that both know."""
    try:
        linear = linear_pattern(pattern)
    except NotLinearError:
        return
    known = regex.compile(pattern)
    for text in texts:
        found = [match.span() for match in linear.matches(text)]
        assert found == [match.span() for match in known.finditer(text)]
        assert linear.is_in(text) == bool(found)


@pytest.mark.parametrize(
    "pattern", ["a$", "(?m)a$", r"a\Z", r"(?s)a.$", "^a", "(?m)^a", r"a\n$", "[^b]$"]
)
@pytest.mark.parametrize("text", ["a\na\n", "a\na", "a\n\n", "ba\nba\n\n", "éa\naé\na\n"])
def test_ends_of_lines_and_texts_are_where_regex_sees_them(pattern: str, text: str) -> None:
    """A dollar sign stands at the end, or in front of a last line break; with m, of any."""
    found = [match.span() for match in linear_pattern(pattern).matches(text)]
    assert found == [match.span() for match in regex.finditer(pattern, text)]


def test_letters_are_alike_but_for_case_as_for_regex() -> None:
    """For every letter that has another case. The sharp s has one more for newer tables."""
    everything = "".join(map(chr, case_variants()))
    for code, alike in case_variants().items():
        if code not in (0xDF, 0x1E9E):
            found = regex.findall(f"(?i){regex.escape(chr(code))}", everything)
            assert {*map(ord, found)} == alike, hex(code)


@pytest.mark.parametrize("flags", ["(?i)", "(?ai)"])
@pytest.mark.parametrize(
    "pattern",
    [
        "[^\u0080-\U0010ffff]+",
        "\u0130",
        "[\u0130]",
        "k",
        "[^k]+",
        "\ufb06",
        "\u1fd3",
        "[i-\uffff]+",
    ],
)
def test_case_without_other_scripts_is_that_of_ascii_alone(flags: str, pattern: str) -> None:
    """With the flag a, no letter is alike to one of another script; a set of others keeps its i, k
    and s then. Letters whose capitals are the same two letters are alike."""
    for text in ("key-islsk", "K\u212a i\u0130\u0131I s\u017fS", "\ufb05\ufb06 \u0390\u1fd3"):
        found = [match.span() for match in linear_pattern(flags + pattern).matches(text)]
        assert found == [match.span() for match in regex.finditer(flags + pattern, text)]


def test_the_meant_group_of_a_match_is_the_one_that_is_redacted() -> None:
    """It keeps what stands before, in texts of any script."""
    policy = Redact(r"(?:key|schlüssel)=(?P<meant>\w+)")
    (after,) = policy.transform([{"role": "user", "content": "schlüssel=größe7 key=ab 😀"}], 0)
    assert after["content"] == "schlüssel=[redacted] key=[redacted] 😀"


@pytest.mark.parametrize(
    ("pattern", "construct"),
    [
        ("a(?=b)", "a lookahead"),
        ("a(?!b)", "a negative lookahead"),
        ("(?<=a)b", "a lookbehind"),
        ("(?<!a)b", "a lookbehind"),
        (r"(a)\1", "a backreference"),
        (r"(?i)(a)\1", "a backreference"),
        ("(a)?(?(1)b|c)", "a condition on a group"),
        ("a++b", "a possessive quantifier"),
        ("(?>a|ab)c", "an atomic group"),
        ("a*", "it may match empty text"),
        ("a{1001}", "repeats more than 1000 times"),
        ("(?:(?:ab){1000}c){1000}", "repeats too much"),
        (r"(?:[\w-]x|ab){900}", "more than 2000 parts"),
        (r"a$|(?m:^b)", "both with the flag m"),
        (r"\ba|(?a:\bb)", "both with the flag a"),
        ("".join(map(chr, range(0x4E00, 0x4E90))), "different characters"),
    ],
)
def test_what_is_not_linear_is_refused_by_name_in_requests(pattern: str, construct: str) -> None:
    """The error names setting and construct; an operator may use what `regex` knows."""
    with pytest.raises(SpecError, match=construct) as refused:
        load_pipeline(f"redact:pattern='{pattern}'", allowance=Allowance())
    assert str(refused.value).startswith("redact: pattern: ")


def test_an_operator_may_use_other_constructs() -> None:
    """`regex` matches them."""
    (policy,) = load_pipeline(r"redact:patterns=['(?<=key=)\w++';'sk-\w+']")
    (after,) = policy.transform([{"role": "user", "content": "key=abc sk-1 abc"}], 0)
    assert after["content"] == "key=[redacted] [redacted] abc"


@pytest.mark.parametrize(
    "spec",
    [
        "quarantine:patterns=[x;'a(?=b)']",
        "remove_regex:remove=['a(?=b)']",
        "drop_failed_calls:pattern='a(?=b)'",
        "tiered:tiers=[\"redact:pattern='a(?=b)'\"]",
        "redact:patterns=[" + ";".join(f"a{n}" for n in range(MAX_PATTERNS + 1)) + "]",
        " | ".join(f"redact:pattern=a{n}" for n in range(9))
        + " | redact:patterns=["
        + ";".join(f"b{n}" for n in range(9))
        + "]",
        "redact:patterns=['a{1000}b{900}';'c{1000}d{900}';'e{1000}']",
    ],
)
def test_every_pattern_of_a_request_is_counted(spec: str) -> None:
    """Whatever the policy's place and the setting's name; an operator's are not."""
    with pytest.raises(SpecError, match=r"linear time|at most"):
        load_pipeline(spec, allowance=Allowance())
    if "tiered" not in spec:
        assert load_pipeline(spec)


@pytest.mark.parametrize("pattern", [r"(?:a|aa)+$", r"(?i)\bsk-\w{8,}", "(?s)x.*?y", "(?x) a b"])
def test_a_pattern_that_a_request_may_bring_never_backtracks(pattern: str) -> None:
    """All policies match it by RE2, also with what they add to it."""
    held: list[UserPattern] = [
        *(rule.pattern for rule in Redact(pattern)._rules),
        *(rule.pattern for rule in Quarantine(rules=(), patterns=(pattern,))._rules),
        *RemoveRegex((pattern,))._compiled,
    ]
    failure = DropFailedCalls(pattern)._failure
    assert failure is not None
    assert all(each.linear is not None for each in (*held, failure))


def _hostile() -> Iterator[tuple[str, str]]:
    yield r"(?:a|aa)+$", "a"
    yield r"(a*)*b|(a+)+c", "a"
    yield r"[ab]*a[ab]{60}c", "ab"
    yield r"(?:a?){50}a{50}b", "a"
    yield r"\b(?:\w+\W?)+\Z", "é "


@pytest.mark.parametrize(("pattern", "unit"), [*_hostile()])
def test_a_hostile_pattern_takes_time_in_proportion_to_the_text(pattern: str, unit: str) -> None:
    """Four times the text takes about four times as long, and a message of it milliseconds."""
    compiled = compile_pattern(pattern)

    def seconds(text: str) -> float:
        best = 9.0
        for _ in range(3):
            begun = time.thread_time()
            compiled.matcher().found_in(text)
            best = min(best, time.thread_time() - begun)
        return best

    short, long = (f"{unit * size}!\n" for size in (20_000, 80_000))
    seconds(short[-2000:])
    assert seconds(long) < 10 * max(seconds(short), 1e-4)
    assert seconds(long) < 1


def test_many_searches_of_one_text_have_a_budget() -> None:
    """A message is withheld, soon, if each of its matches makes RE2 read to the end."""
    messages: list[Message] = [{"role": "user", "content": "a" * 60_000}]
    begun = time.thread_time()
    (after,) = Redact("(?s)a.*c|a").transform(messages, 0)
    assert after["content"] == "[redacted]"
    assert time.thread_time() - begun < 2


def test_a_long_text_is_withheld_from_a_large_pattern() -> None:
    """The most that a search could take is known before it begins."""
    pattern = compile_pattern("[ab]{900}c")
    assert pattern.linear is not None
    longest = MAX_WORK // pattern.linear.size
    assert pattern.linear.is_in_reach("a" * longest)
    with pytest.raises(PatternTimeoutError):
        pattern.matcher().found_in("a" * (longest + 1))


def test_replacements_make_no_text_much_longer() -> None:
    """A pattern of one letter and a long replacement can't fill the memory."""
    messages: list[Message] = [{"role": "user", "content": "a" * 3_000}]
    (after,) = Redact("a", replacement="x" * 200).transform(messages, 0)
    assert after["content"] == "x" * 200
    with pytest.raises(SpecError, match="200"):
        load_pipeline(f"redact:pattern=a,replacement={'x' * 201}")


@pytest.mark.parametrize(
    "spec",
    [
        "(?i)" + "[\\x00-\\U0010ffff]" * 100,
        "(?i)" + "".join(f"[{chr(n)}-\\U0010ffff]" for n in range(0x4E00, 0x4E60)),
        "(?:" * 500 + "a" + "){1,2}" * 500,
        "(?:" + "|".join(f"{n:03}" for n in range(900)) + ")",
        r"[\w-]{20,512}",
        "".join(rf"[\w{chr(n)}]" for n in range(0x4E00, 0x4E70)),
    ],
    ids=range(6),
)
def test_compilation_is_bounded(spec: str) -> None:
    """A pattern as long as a spec may be is read in a moment, and never takes seconds."""
    linear_pattern("a|[b-c]\\w")  # what all patterns need is made once
    begun = time.thread_time()
    with suppress(NotLinearError, RecursionError):
        linear_pattern(spec)
    assert time.thread_time() - begun < 1.5
