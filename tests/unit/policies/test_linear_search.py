"""No text makes a built-in policy slow: each takes time in proportion to it, whatever it says."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import pkgutil
import re
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import regex
from hostile_texts import grows_too_fast, hostile_texts, repeated
from support.builtin_specs import SPECS
from tool_talks import asks, call, result, steps

import leyline_policies
from leyline_policies import Message, Policy, SpecError, load_pipeline
from leyline_policies.builtin import BUILTINS
from leyline_policies.builtin.catalogue import load_catalogue
from leyline_policies.builtin.detectors import KEYS, PII, Rule, load_detectors
from leyline_policies.builtin.patterns import UserPattern
from leyline_policies.builtin.redact import Redact
from leyline_policies.builtin.search import Search
from leyline_policies.context import Context, apply

KEY = "sk-ant-" + "api03-" + "aB3dE6gH9jK2mN5pQ8sT1vW4yZ7bC0eF"
PEM = "-----BEGIN PRIVATE KEY-----"


def _searched() -> Iterator[tuple[str, str]]:
    """Name and text of each pattern that the detectors and the built-in policies search with."""
    for name in (*KEYS, *PII):
        for number, rule in enumerate(load_detectors([name])):
            yield f"{name} {number}", rule.pattern.text
    for number, each in enumerate(load_catalogue()):
        if each.surroundings is not None:
            yield f"{each.kind} inside {number}", each.expression
    for number, rule in enumerate(load_detectors(["phone"], "US")):
        yield f"phone {number} in a region", rule.pattern.text
    for name in BUILTINS:
        try:
            (policy,) = load_pipeline(name)
        except SpecError:
            continue  # it has no pattern of its own, only those that it is given
        for number, pattern in enumerate(_patterns_in(policy)):
            yield f"{name} {number}", pattern.text


def _patterns_in(held: Any) -> Iterator[UserPattern]:
    """The patterns that a policy holds, itself or inside."""
    if isinstance(held, UserPattern):
        yield held
    elif isinstance(held, tuple):
        for each in held:
            yield from _patterns_in(each)
    elif isinstance(held, Rule) or (dataclasses.is_dataclass(held) and hasattr(held, "mode")):
        for field in dataclasses.fields(held):
            yield from _patterns_in(getattr(held, field.name))


SEARCHED = dict(_searched())
ASSIGNED = [each for each in load_catalogue() if each.names]


def _cases() -> Iterator[Any]:
    """The patterns; at night, too, those that differ from another only by names and value."""
    common = {each.separator: each.expression for each in ASSIGNED}.values()
    rare = {each.expression for each in ASSIGNED} - {*common}
    for name, text in SEARCHED.items():
        yield pytest.param(name, marks=pytest.mark.nightly if text in rare else ())


@pytest.mark.parametrize("name", [*_cases()])
def test_a_pattern_takes_time_in_proportion_to_the_text(name: str) -> None:
    """It does so on runs of its text, on its beginnings over and over, and on both."""
    pattern = regex.compile(SEARCHED[name])

    def search(text: str) -> None:
        pattern.sub("", text, timeout=5)

    for text, made in hostile_texts(SEARCHED[name]):
        assert not grows_too_fast(search, made), text


def test_all_patterns_are_among_them() -> None:
    """Those of the detectors, of quarantine's rules and of what remove_regex removes by default."""
    assert {name.partition(" ")[0] for name in SEARCHED} == {
        *(*KEYS, *PII, "quarantine", "remove_regex")
    }
    assert sum(name.startswith("quarantine") for name in SEARCHED) == 6


@pytest.mark.parametrize(
    "pattern",
    [
        rf"{PEM}\s*(?:(?!-----)[A-Za-z-]*(?:\n|\\+r?\\*n))*?-----END",
        r"\beyJ[\w-]{8,}\.eyJ",
        r"(a|aa)+$",
    ],
)
def test_patterns_that_are_not_linear_are_told(pattern: str) -> None:
    """Earlier versions of the shipped ones, and an endless one, fail the test above."""
    compiled = regex.compile(pattern)

    def search(text: str) -> None:
        compiled.sub("", text, timeout=0.2)

    def is_slow(made: Callable[[int], str]) -> bool:
        try:
            return grows_too_fast(search, made)
        except TimeoutError:
            return True

    assert any(is_slow(made) for _, made in hostile_texts(pattern))


@cache
def _module_patterns(name: str) -> tuple[str, ...]:
    """The patterns that a module, or what all policies look at, compiles once."""
    modules = map(importlib.import_module, (name, "leyline_policies.failures"))
    values = [value for module in modules for value in vars(module).values()]
    return tuple(value.pattern for value in values if isinstance(value, re.Pattern))


def _talk(text: str) -> list[Message]:
    """The text in each place that policies look at, and enough after it to make it old."""
    return [
        {"role": "system", "content": f"time\n{text}"},
        {"role": "user", "content": text},
        asks(call("a", arguments=f'{{"command": "{text[:200].encode().hex()}"}}'), content=text),
        result("a", text),
        *steps(("bash", text), ("bash", "ok"), ("bash", "ok"), start=7),
        {"role": "user", "content": "go on"},
    ]


@pytest.mark.parametrize("name", BUILTINS)
def test_a_policy_takes_time_in_proportion_to_the_text(name: str) -> None:
    """It does for any tool output: beginnings of text that its module looks for, and other runs."""
    (policy,) = load_pipeline(SPECS[name][0])
    units = ["a", " ", "\n", "\\", "{", "<think>", "[File: (", "1:\n", "Error: ", "{'a':", '"\\"']
    made: dict[str, Callable[[int], str]] = {unit: partial(repeated, unit) for unit in units}
    for pattern in _module_patterns(type(policy).__module__):
        found = [(text, each) for text, each in hostile_texts(pattern) if "repeated" in text]
        made |= dict(found[:: 1 + len(found) // 12])

    def run(text: str) -> None:
        _applied(policy, _talk(text))

    for text, each in made.items():
        assert not grows_too_fast(run, each), text


def _applied(policy: Policy, messages: list[Message]) -> list[Message]:
    return apply(policy, messages, 9, Context(turn=9, window=100, idle_s=900, elapsed_s=900))


def test_no_pattern_hides_in_a_function() -> None:
    """Patterns are compiled where modules begin, so that the tests above find them."""
    hidden: list[str] = []
    for found in pkgutil.walk_packages(leyline_policies.__path__, "leyline_policies."):
        file = importlib.import_module(found.name).__file__
        tree = ast.parse(Path(str(file)).read_text(encoding="utf-8"))
        bodies = [each for each in tree.body if isinstance(each, ast.FunctionDef | ast.ClassDef)]
        hidden += [
            f"{found.name}:{node.lineno}"
            for body in bodies
            for node in ast.walk(body)
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id in ("re", "regex")
            and node.args
            and isinstance(node.args[0], ast.Constant | ast.JoinedStr)
        ]
    assert hidden == []


@pytest.mark.parametrize(
    "attack",
    [
        PEM + "\\" * 16_000,
        f"x{PEM}\n" * 4_000,
        PEM + "\n" * 100_000,
        "sk-" * 40_000,
        "eyJaaaaaaaa-" * 10_000,
        "//a/" * 25_000,
        "+1234567 " * 1_500,
        '["' + '", "'.join(str(n) for n in range(20_000)) + '"]',
    ],
    ids=lambda text: f"{text[:12]}…",
)
def test_no_tool_output_hides_a_key(attack: str) -> None:
    """The keys beside it and in other messages go however it tries to use up the time, it is sent
    itself, and on the next turn the same is sent."""
    policy, context = Redact(detectors=("keys", "pii")), Context()
    messages = [
        {"role": "user", "content": f"my key is {KEY}"},
        asks(call("a"), call("b", arguments=f'{{"key": "{KEY}"}}')),
        result("a", f"{attack} {KEY} and more"),
        result("b", f"then {KEY}"),
    ]
    sent = policy.transform(messages, 0, context)
    assert KEY not in str(sent)
    assert sent[2]["content"].endswith(" and more")
    assert policy.transform(messages, 1, Context()) == sent


@pytest.mark.parametrize("size", [200_000, pytest.param(1_000_000, marks=pytest.mark.nightly)])
def test_nothing_but_beginnings_is_searched_in_time(size: int) -> None:
    """All detectors together, on text made for each of them, stay within what is allowed."""
    makers = [made for pattern in SEARCHED.values() for _, made in hostile_texts(pattern)]
    text = "".join(made(100) for made in makers)
    search = Search(load_detectors(["keys", "pii"]))
    assert search.redacted(f"{repeated(text, size)} {KEY}", "[]").endswith(" []")
