"""Settings of every type, from the spec language and typed; specs written and read back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyline_policies import Message, Registry, SpecError, load_pipeline
from leyline_policies.grammar import Step, Value, parse_steps, value_of, write_steps
from leyline_policies.parameters import read_parameters
from leyline_policies.registry import Candidate
from leyline_policies.spec import build_policy


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
    either: int | Literal["all"] = 1
    told: Annotated[int, "how many"] = 0
    odd: dict[str, int] | None = None

    name = "every"
    mode = "amortize"

    def transform(self, messages: list[Message], turn_idx: int) -> list[Message]:
        """Edit nothing."""
        return messages


EVERY = Registry([Candidate("every", "a test", lambda: Every)])


@pytest.mark.parametrize(
    ("key", "written", "typed"),
    [
        ("whole", "7", 7),
        ("number", "2", 2),
        ("number", "0.25", 0.25),
        ("flag", "true", True),
        ("text", "'none'", "none"),
        ("text", "12", "12"),
        ("names", "[a;b]", ["a", "b"]),
        ("names", "a", "a"),
        ("names", "none", None),
        ("frozen", "[a;a;b]", ["a", "b", "b"]),
        ("several", "[a;b]", ("a", "b")),
        ("choice", "tail", "tail"),
        ("maybe", "none", None),
        ("either", "all", "all"),
        ("either", "5", 5),
        ("told", "4", 4),
    ],
)
def test_typed_and_written_values_are_one(key: str, written: str, typed: object) -> None:
    """A typed value gives the same policy as the text of the spec language."""
    assert (build_policy("every", [(key, typed)], EVERY),) == load_pipeline(
        f"every:{key}={written}", EVERY
    )


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("whole", True, "whole=true is not a whole number"),
        ("whole", 1.0, "whole=1.0 is not a whole number"),
        ("whole", "1", "whole='1' is not a whole number"),
        ("whole", None, "whole=null is not a whole number"),
        ("number", False, "number=false is not a number"),
        ("number", float("nan"), "number=nan is not a number"),
        ("number", 10**400, "is not a number"),
        ("flag", 1, "flag=1 is not true or false"),
        ("flag", "yes", "flag='yes' is not true or false"),
        ("text", 5, "text=5 is not text"),
        ("names", [1], "names=[...] is not a list"),
        ("names", {"a": 1}, "names={...} is not a list"),
        ("choice", "middle", "is not one of head, tail"),
        ("choice", ["head"], "is not one of head, tail"),
        ("either", "some", "either='some' is not a whole number or one of all"),
        ("odd", 1, "can't be set in a spec"),
    ],
)
def test_typed_values_are_not_bent(key: str, value: object, words: str) -> None:
    """A value of another type is refused and not converted."""
    with pytest.raises(SpecError) as caught:
        build_policy("every", [(key, value)], EVERY)
    assert words in str(caught.value)


def test_annotations_may_say_what_a_setting_is_for() -> None:
    """The text in an annotation is the setting's help and part of its schema."""
    told = {each.name: each for each in read_parameters(Every)}["told"]
    assert (told.help, told.kind) == ("how many", "a whole number")
    assert told.schema() == {"description": "how many", "default": 0, "type": "integer"}


texts = st.text(max_size=12)
values = st.one_of(
    st.builds(lambda text: Value(text, quoted=True), texts),
    st.builds(lambda items: Value("", items=tuple(items)), st.lists(texts, max_size=3)),
    st.builds(value_of, st.one_of(st.none(), st.booleans(), st.integers(), st.floats())),
)
names = st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True)
steps = st.builds(
    Step, names, st.dictionaries(names, values, max_size=4).map(lambda d: (*d.items(),))
)


def _meaning(step: Step) -> tuple[str, dict[str, Any]]:
    """The meaning of a step: for a list its items, else the text, and if none is meant."""
    settings: dict[str, Any] = {}
    for key, value in step.settings:
        is_none = not value.quoted and value.text.lower() == "none"
        settings[key] = value.items if value.items is not None else (value.text, is_none)
    return step.name, settings


@given(st.lists(steps, max_size=4))
def test_written_specs_read_back(pipeline: list[Step]) -> None:
    """A pipeline's text is read as the same pipeline, whatever values it has."""
    found = parse_steps(write_steps(pipeline))
    assert [_meaning(step) for step in found] == [_meaning(step) for step in pipeline]


@pytest.mark.parametrize(
    "spec",
    [
        "a:k=[b;c]",
        "a:k=[a-f, 0-9]",
        "a:k='none' | b:k=none",
        "a:k='it''s \"so\"',l=''",
        "a | b:n=1,m=1.5,l=[]",
    ],
)
def test_specs_are_written_as_they_were_read(spec: str) -> None:
    """Reading and writing gives the spec's own meaning again."""
    read = parse_steps(spec)
    assert [_meaning(each) for each in parse_steps(write_steps(read))] == list(map(_meaning, read))
