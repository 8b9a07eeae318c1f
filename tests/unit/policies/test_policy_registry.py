"""The origins of policies, and the messages about those that can't be used."""

from __future__ import annotations

import pytest

from leyline_policies import (
    FunctionPolicy,
    Message,
    NameClashError,
    PluginError,
    Registry,
    SpecError,
    function_policy,
    load_pipeline,
    map_text,
)
from leyline_policies.builtin import BUILTINS
from leyline_policies.registry import Candidate, built_in_candidates


class ShortPastes:
    """The documentation's first example."""

    name = "short_pastes"
    mode = "amortize"

    def __init__(self, limit: int = 2000) -> None:
        self.limit = limit

    def transform(self, messages: list[Message], turn_idx: int) -> list[Message]:
        """Shorten every text."""
        return [map_text(m, lambda text: text[: self.limit]) for m in messages]


def short_pastes(messages: list[Message], turn_idx: int, *, limit: int = 2000) -> list[Message]:
    """The documentation's second example."""
    return [map_text(m, lambda text: text[:limit]) for m in messages]


class Refusing:
    """A policy whose constructor fails."""

    def __init__(self, kind: str = "value") -> None:
        raise {"value": ValueError, "key": KeyError}[kind]("not like this")


class Nameless:
    """A class that is no policy."""

    mode = "amortize"

    def transform(self, messages: list[Message], turn_idx: int) -> list[Message]:
        """Edit nothing."""
        return messages


class WrongMode(Nameless):
    """A class with a mode that does not exist."""

    name = "it"
    mode = "sometimes"


class NoTransform:
    """A class without the method."""

    name = "it"
    mode = "forget"


class Unreadable(Nameless):
    """A class whose annotations can't be resolved."""

    name = "it"

    def __init__(self, limit: NoSuchType = 1) -> None:  # type: ignore[name-defined]  # noqa: F821
        self.limit = limit


def _registry(loaded: object, name: str = "it") -> Registry:
    return Registry([Candidate(name, "distribution d 1.0, entry point 'it = m:X'", lambda: loaded)])


@pytest.mark.parametrize("example", [ShortPastes, short_pastes])
def test_examples_of_the_documentation(example: object) -> None:
    """A ten-line class and a plain function both work, settings included."""
    registry = _registry(example, "short_pastes")
    (policy,) = load_pipeline("short_pastes:limit=3", registry)
    messages: list[Message] = [{"role": "user", "content": "abcdef", "x": 1}]
    assert policy.transform(messages, 0) == [{"role": "user", "content": "abc", "x": 1}]
    assert (policy.name, policy.mode) == ("short_pastes", "amortize")
    definition = registry.get("short_pastes")
    assert [each.name for each in definition.parameters] == ["limit"]
    assert definition.summary.startswith("The documentation's")


def test_decorated_function_sets_name_and_mode() -> None:
    """The decorator gives a function another name and the mode forget, and keeps its settings."""
    decorated = function_policy(name="it", mode="forget")(short_pastes)
    assert isinstance(decorated, FunctionPolicy)
    (policy,) = load_pipeline("it:limit=1", _registry(decorated))
    assert (policy.name, policy.mode) == ("it", "forget")
    assert policy.transform([{"role": "user", "content": "ab"}], 0)[0]["content"] == "a"
    with pytest.raises(SpecError, match="limit='x' is not a whole number"):
        load_pipeline("it:limit=x", _registry(decorated))


@pytest.mark.parametrize(
    ("loaded", "message"),
    [
        (Nameless, "its attribute name is None"),
        (WrongMode, "its attribute mode is 'sometimes'"),
        (NoTransform, "no method transform"),
        (Unreadable, "NoSuchType"),
        (42, "it is a int"),
        (lambda messages: messages, r"must take \(messages, turn_idx\)"),
    ],
)
def test_unusable_plugin_is_named(loaded: object, message: str) -> None:
    """An entry point's object is checked when it is loaded; its package is named."""
    with pytest.raises(PluginError, match=message) as caught:
        load_pipeline("it", _registry(loaded))
    assert "distribution d 1.0, entry point 'it = m:X'" in str(caught.value)


def test_constructor_errors_are_told_apart() -> None:
    """A ValueError is the spec's fault, any other exception the plugin's."""
    with pytest.raises(SpecError, match="it: not like this"):
        load_pipeline("it", _registry(Refusing))
    with pytest.raises(PluginError, match="distribution d"):
        load_pipeline("it:kind=key", _registry(Refusing))


@pytest.mark.parametrize("failure", [ImportError("no torch"), SystemExit(3), SyntaxError("bad")])
def test_failing_import_is_named(failure: BaseException) -> None:
    """The error names a plugin's package and entry point, however its import ends."""

    def load() -> object:
        raise failure

    registry = Registry([*built_in_candidates(), Candidate("broken", "distribution d 1.0", load)])
    with pytest.raises(PluginError, match=r"'broken' can't be imported \(distribution d 1\.0\)"):
        registry.get("broken")
    with pytest.raises(PluginError, match="broken"):
        registry.all()
    assert load_pipeline("keep_all", registry)


def test_name_clash_names_both() -> None:
    """Two packages with one name are an error that names both, once the name is asked for."""
    clash = Candidate("redact", "distribution d 1.0", lambda: ShortPastes)
    registry = Registry([*built_in_candidates(), clash])
    with pytest.raises(NameClashError) as caught:
        load_pipeline("redact:pattern=x", registry)
    assert "built into leyline and distribution d 1.0" in str(caught.value)
    assert load_pipeline("keep_all", registry)


def test_built_in_policies_are_listed() -> None:
    """Every built-in policy can be listed with a summary of what it does."""
    definitions = Registry(built_in_candidates()).all()
    assert [each.name for each in definitions] == sorted(BUILTINS)
    assert all(each.summary for each in definitions)
