"""The text form of pipelines, and the typed settings read from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyline_policies import Message, Policy, Registry, SpecError, load_pipeline
from leyline_policies.builtin.drop_failed_calls import DropFailedCalls
from leyline_policies.builtin.keep_all import KeepAll
from leyline_policies.builtin.redact import Redact
from leyline_policies.builtin.truncate_older_than import TruncateOlderThan
from leyline_policies.grammar import MAX_STEPS, Step, Value, parse_steps
from leyline_policies.registry import Candidate


@dataclass(frozen=True)
class Every:
    """A policy with a setting of each type."""

    whole: int = 1
    number: float = 0.5
    flag: bool = False
    text: str = ""
    names: list[str] | None = None
    frozen: frozenset[str] = frozenset()
    several: Sequence[str] = ()
    choice: Literal["head", "tail"] = "head"
    maybe: int | None = 3
    odd: dict[str, int] | None = None

    name = "every"
    mode = "amortize"

    def transform(self, messages: list[Message], turn_idx: int) -> list[Message]:
        """Edit nothing."""
        return messages


EVERY = Registry([Candidate("every", "a test", lambda: Every)])


def _every(settings: str) -> object:
    return load_pipeline(f"every:{settings}", EVERY)[0]


@pytest.mark.parametrize(
    ("spec", "policies"),
    [
        ("", ()),
        ("  ", ()),
        ("keep_all", (KeepAll(),)),
        ("keep_all:", (KeepAll(),)),
        ("truncate_older_than:n=2,max_chars=200", (TruncateOlderThan(2, 200),)),
        (" truncate_older_than : n = 3 | keep_all ", (TruncateOlderThan(3), KeepAll())),
        ("truncate_older_than:tools=[bash;read]", (TruncateOlderThan(tools=("bash", "read")),)),
        (
            "truncate_older_than:tools=[bash, read],n=0",
            (TruncateOlderThan(0, 200, ("bash", "read")),),
        ),
        ("truncate_older_than:tools=bash", (TruncateOlderThan(tools=("bash",)),)),
        ("truncate_older_than:tools=none", (TruncateOlderThan(),)),
        ("drop_failed_calls:pattern='^E|^F'", (DropFailedCalls("^E|^F"),)),
        ('redact:pattern="a,b"', (Redact("a,b"),)),
        ('redact:pattern="a|b" | keep_all', (Redact("a|b"), KeepAll())),
        (r'redact:pattern="\bsk-\w+\\",replacement=""', (Redact(r"\bsk-\w+\\", ""),)),
        ('redact:pattern="say ""x"""', (Redact('say "x"'),)),
        ("redact:pattern='don''t'", (Redact("don't"),)),
        (r"redact:pattern=[a-f,0-9]+\d", (Redact(r"[a-f,0-9]+\d"),)),
        ('redact:pattern=x,roles=["tool";user]', (Redact("x", roles=("tool", "user")),)),
    ],
)
def test_pipeline_is_read(spec: str, policies: tuple[Policy, ...]) -> None:
    """Each form of the grammar gives the policies it says."""
    assert load_pipeline(spec) == policies


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ("whole=-7", Every(whole=-7)),
        ("number=2", Every(number=2.0)),
        ("flag=TRUE", Every(flag=True)),
        ("flag=off", Every(flag=False)),
        ("text=", Every(text="")),
        ("text='none'", Every(text="none")),
        ("names=[a;'b;c']", Every(names=["a", "b;c"])),
        ("names=[]", Every(names=[])),
        ("frozen=[a;a]", Every(frozen=frozenset({"a"}))),
        ("several=[a;b]", Every(several=("a", "b"))),
        ("choice=tail", Every(choice="tail")),
        ("maybe=none", Every(maybe=None)),
    ],
)
def test_settings_are_typed(settings: str, expected: Every) -> None:
    """A value becomes what the constructor's annotation says."""
    assert _every(settings) == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("whole=two", "every: whole='two' is not a whole number"),
        ("whole=1.5", "whole='1.5' is not a whole number"),
        ("number=nan", "number='nan' is not a number"),
        ("flag=maybe", "flag='maybe' is not true or false"),
        ("choice=middle", "choice='middle' is not one of head, tail"),
        ("maybe=", "maybe='' is not a whole number"),
        ("odd=1", "odd='1' can't be set in a spec"),
    ],
)
def test_wrong_type_names_the_value(settings: str, message: str) -> None:
    """A value of the wrong type is named together with what was expected."""
    with pytest.raises(SpecError) as caught:
        _every(settings)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "fragments"),
    [
        (
            "truncate_older:n=2",
            ["'truncate_older'", "did you mean 'truncate_older_than'", "known:"],
        ),
        ("zzz", ["no policy is called 'zzz' (known: ", "keep_all"]),
        ("truncate_older_than:max_char=2", ["'max_char'", "did you mean 'max_chars'"]),
        ("keep_all:n=1", ["keep_all has no parameter 'n'", "takes no parameters"]),
        ("truncate_older_than:n=1,n=2", ["n is set twice"]),
        ("truncate_older_than:n", ["'n' has no value"]),
        ("truncate_older_than:=1", ["a key is missing"]),
        ("truncate_older_than:n=1,", ["a key is missing"]),
        ("truncate_older_than:n=-1", ["truncate_older_than: n=-1 is negative"]),
        ("truncate_older_than:tools=[]", ["names no tool"]),
        ("truncate_older_than:tools=[bash", ["never closed", "character 26"]),
        ("keep_all | | keep_all", ["a policy name is missing", "character 11"]),
        ("keep_all |", ["a policy name is missing"]),
        ("keep all", ["'keep all' is no policy name"]),
        ("redact", ["redact: nothing to look for", "give pattern"]),
        ("redact:pattern=", ["pattern is empty"]),
        ("redact:pattern='(a'", ["'(a' is no regular expression", "position 0"]),
        ("redact:pattern='x*'", ["matches empty text"]),
        ("redact:pattern='x", ["the quote ' is never closed"]),
        (r'redact:pattern="a\"b"', ["follows the value of pattern", "twice"]),
        ("redact:pattern=x|y*", ["'y*' is no policy name", "quote a value"]),
        ("redact:pattern=x,roles=[usr]", ["'usr' is no role", "did you mean 'user'"]),
        ("redact:pattern=x,roles=[]", ["names no role"]),
        ("drop_failed_calls:pattern=[", ["never closed"]),
    ],
)
def test_mistake_is_explained(spec: str, fragments: list[str]) -> None:
    """Every mistake in a spec is a SpecError that names the place and the fix."""
    with pytest.raises(SpecError) as caught:
        load_pipeline(spec)
    for fragment in fragments:
        assert fragment in str(caught.value)


def test_long_value_is_shortened_in_errors() -> None:
    """An error message does not repeat a value of any length."""
    with pytest.raises(SpecError) as caught:
        load_pipeline(f"truncate_older_than:n={'9x' * 5000}")
    assert len(str(caught.value)) < 200


def _quoted(text: str) -> str:
    return '"' + text.replace('"', '""') + '"'


@given(
    st.lists(
        st.tuples(
            st.from_regex(r"[a-z_]{1,8}", fullmatch=True),
            st.dictionaries(st.from_regex(r"[a-z]{1,5}", fullmatch=True), st.text(), max_size=3),
        ),
        min_size=1,
        max_size=3,
    )
)
def test_quoting_carries_any_text(steps: list[tuple[str, dict[str, str]]]) -> None:
    """The quoted form of any text is read back unchanged."""
    spec = " | ".join(
        name + ":" + ",".join(f"{key}={_quoted(value)}" for key, value in settings.items())
        for name, settings in steps
    )
    expected = tuple(
        Step(name, tuple((key, Value(value, quoted=True)) for key, value in settings.items()))
        for name, settings in steps
    )
    assert parse_steps(spec) == expected


@given(st.text(alphabet="ab:=,|[];\"' \\", max_size=24))
def test_any_text_is_read_or_refused(spec: str) -> None:
    """No text makes the parser fail in another way than by a SpecError."""
    parser: Callable[[str], Any] = parse_steps
    try:
        parser(spec)
    except SpecError as error:
        assert str(error)


def test_pipelines_are_bounded() -> None:
    """A spec can't chain policies without end: each may take its own time on a turn."""
    assert len(parse_steps(" | ".join(["keep_all"] * MAX_STEPS))) == MAX_STEPS
    with pytest.raises(SpecError, match=str(MAX_STEPS)):
        parse_steps(" | ".join(["keep_all"] * (MAX_STEPS + 1)))
