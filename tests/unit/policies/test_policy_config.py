"""Policies from YAML: what is read, who gets which, and what is said of mistakes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from leyline_policies import Registry, SpecError, load_pipeline
from leyline_policies.builtin.keep_all import KeepAll
from leyline_policies.builtin.redact import Redact
from leyline_policies.builtin.truncate_older_than import TruncateOlderThan
from leyline_policies.config import ConfigError, load_policies, parse_policies
from leyline_policies.located import MAX_BYTES, read_yaml
from leyline_policies.registry import Candidate, built_in_candidates
from leyline_policies.schema import policy_schema

REGISTRY = Registry(built_in_candidates())
SCHEMA = policy_schema(REGISTRY)

GOOD = """\
policies:                       # for everyone
  - truncate_older_than: {n: 3, max_chars: 100, tools: [bash, read]}
  - redact:
      pattern: 'a|b'
      roles: [tool]
  - keep_all
  - drop_failed_calls:
  - "truncate_older_than:n=1 | keep_all"
tenants:
  team-a: {policies: [keep_all]}
  silent: {policies: []}
models:
  "qwen*": {policies: [{truncate_older_than: {n: 9, tools: null}}]}
  "qwen3*": {policies: [keep_all]}
"""


def _error(text: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        parse_policies(text, REGISTRY)
    return caught.value


def test_every_form_is_read() -> None:
    """Settings, a bare name, a name without settings and a spec give the policies they say."""
    found = parse_policies(GOOD, REGISTRY).choose(None, None)
    assert found[:3] == (
        TruncateOlderThan(3, 100, ("bash", "read")),
        Redact("a|b", roles=("tool",)),
        KeepAll(),
    )
    assert found[4:] == (TruncateOlderThan(1), KeepAll())


def test_tenant_beats_model_beats_default() -> None:
    """The tenant's policies hold before the model's, the first pattern before later ones."""
    found = parse_policies(GOOD, REGISTRY)
    assert found.choose("team-a", "qwen3-8b") == (KeepAll(),)
    assert found.choose("silent", None) == ()
    assert found.choose("team-b", "qwen3-8b") == (TruncateOlderThan(9),)
    assert found.choose(None, "Qwen3-8b") == found.choose(None, None)
    assert found.choose("x", "m") is found.choose("y", None)


def test_description_is_the_same_as_spec() -> None:
    """Each pipeline is written in the spec language, which gives the same policies."""
    found = parse_policies(GOOD, REGISTRY)
    told = found.describe()
    assert list(told) == [
        "default",
        "tenant team-a",
        "tenant silent",
        "model qwen*",
        "model qwen3*",
    ]
    assert load_pipeline(told["default"], REGISTRY) == found.choose(None, None)
    assert load_pipeline(told["model qwen*"], REGISTRY) == (TruncateOlderThan(9),)
    assert told["tenant silent"] == ""


def test_wrappers_are_built_as_from_a_spec() -> None:
    """Settings that every policy takes mean the same in both languages."""
    settings = "{n: 2, when: 'tokens > 60000', protect_tools: [bash], at_least: 5, dry_run: true}"
    (found,) = parse_policies(f"policies: [truncate_older_than: {settings}]", REGISTRY).choose(
        "", ""
    )
    spec = "truncate_older_than:n=2,when='tokens > 60000',protect_tools=bash,at_least=5,dry_run=on"
    assert (found,) == load_pipeline(spec, REGISTRY)


@pytest.mark.parametrize(
    ("text", "place", "fragments"),
    [
        ("policies:\n  - truncate_older:\n", (2, 5), ["did you mean 'truncate_older_than'"]),
        ("policies:\n  - truncate_older\n", (2, 5), ["did you mean 'truncate_older_than'"]),
        ("policies:\n - redact: {patern: x}\n", (2, 13), ["did you mean 'pattern'"]),
        ("policies:\n - keep_all: {whn: x}\n", (2, 15), ["did you mean 'when'"]),
        (
            "policies:\n - truncate_older_than:\n     n: 1\n     max_chars: many\n",
            (4, 6),
            ["max_chars='many' is not a whole number"],
        ),
        ("policies:\n - truncate_older_than:\n     n: -1\n", (3, 6), ["n=-1 is negative"]),
        ("policies:\n - truncate_older_than:\n     n: '1'\n", (3, 6), ["n='1' is not a whole"]),
        ("policies:\n - truncate_older_than:\n     n: true\n", (3, 6), ["n=true is not a whole"]),
        ("policies:\n - truncate_older_than:\n     n: 1.5\n", (3, 6), ["n=1.5 is not a whole"]),
        ("policies:\n - truncate_older_than:\n     n: null\n", (3, 6), ["n=null is not a whole"]),
        ("policies:\n - truncate_older_than:\n     n: [1]\n", (3, 6), ["n=[...] is not a whole"]),
        ("policies:\n - truncate_older_than:\n     n: {a: 1}\n", (3, 6), ["n={...} is not"]),
        ("policies:\n - truncate_older_than:\n     tools: [1]\n", (3, 6), ["is not a list such"]),
        ("policies:\n - redact:\n     pattern: 12\n", (3, 6), ["pattern=12 is not text"]),
        ("policies:\n - redact:\n     pattern: '('\n", (3, 6), ["no regular expression"]),
        ("policies:\n - keep_all:\n     when: toks > 1\n", (3, 6), ["did you mean 'tokens'"]),
        ("policies:\n - keep_all:\n     every: 0\n", (3, 6), ["every=0", "1 turn or more"]),
        ("policies:\n - 'keep_all | | keep_all'\n", (2, 4), ["a policy name is missing"]),
        ("policies:\n - {keep_all: , redact: }\n", (2, 4), ["an object of one member"]),
        ("policies:\n - 7\n", (2, 4), ["a policy is its name"]),
        ("policies:\n - keep_all: [1]\n", (2, 14), ["must be an object"]),
        ("policies: keep_all\n", (1, 11), ["must be a list"]),
        (f"policies: [{'keep_all, ' * 17}]\n", (1, 172), ["at most 16"]),
        ("polices: []\n", (1, 1), ["did you mean 'policies'", "known: policies, tenants"]),
        ("- keep_all\n", (1, 1), ["must be an object with policies"]),
        ("tenants: [a]\n", (1, 10), ["tenants must be an object"]),
        ("tenants:\n  a: [keep_all]\n", (2, 6), ["a tenant must be an object"]),
        ("models:\n  'q*': {}\n", (2, 9), ["'q*' needs policies"]),
        ("models:\n  'q*': {policy: []}\n", (2, 10), ["did you mean 'policies'"]),
        ("policies: []\ntenants: {}\npolicies: []\n", (3, 1), ["set twice; first in line 1"]),
        ("", (1, 1), ["is empty"]),
        ("policies: [\n", (2, 1), ["no YAML"]),
        ("policies: []\n---\npolicies: []\n", (2, 1), ["single document"]),
        ("a: *nobody\n", (1, 4), ["undefined alias"]),
        ("a: &x [*x]\n", (1, 4), ["inside what it repeats"]),
        ("<<: {policies: []}\n", (1, 1), ["merge keys"]),
        ("[a]: 1\n", (1, 1), ["a key is text"]),
        ("policies: !!python/name:os.system\n", (1, 11), ["'!!python/name:os.system'"]),
        ("policies: !mine []\n", (1, 11), ["'!mine'"]),
        ("a: " + "[" * 40 + "]" * 40, (1, 35), ["nested too deep"]),
    ],
)
def test_mistake_names_the_place(text: str, place: tuple[int, int], fragments: list[str]) -> None:
    """Every mistake is a SpecError that names line and column, and the closest names."""
    error = _error(text)
    assert (error.line, error.column) == place, str(error)
    assert str(error).startswith(f"policies.yaml:{place[0]}:{place[1]}: ")
    assert isinstance(error, SpecError)
    for fragment in fragments:
        assert fragment in str(error)


def test_aliases_may_repeat_but_not_explode() -> None:
    """An alias gives a tenant the pipeline of another; a bomb of aliases is refused at once."""
    text = "policies: &all [keep_all]\ntenants: {a: {policies: *all}}\n"
    assert parse_policies(text, REGISTRY).choose("a", None) == (KeepAll(),)
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    assert "20,000 values" in str(_error("\n".join(lines)))


@pytest.mark.parametrize("text", ["[" * 100_000, "{a: " * 50_000, "- " * 50_000])
def test_deep_nesting_is_refused(text: str) -> None:
    """Text that nests without end is an error, and no crash."""
    assert "nested too deep" in str(_error(text))


def test_large_file_is_refused(tmp_path: Path) -> None:
    """A file of more than a megabyte isn't parsed."""
    file = tmp_path / "big.yaml"
    file.write_text("# " + "é" * (MAX_BYTES // 2))
    with pytest.raises(ConfigError, match="larger than 1 MB"):
        load_policies(file, REGISTRY)


def test_file_is_named(tmp_path: Path) -> None:
    """Errors begin with the file's path; a file that can't be read says why."""
    file = tmp_path / "mine.yaml"
    with pytest.raises(ConfigError, match=r"mine\.yaml: can't be read: No such file"):
        load_policies(file, REGISTRY)
    file.write_bytes(b"policies:\n - \xff\n")
    with pytest.raises(ConfigError, match=r"mine\.yaml:2:1: is no UTF-8"):
        load_policies(file, REGISTRY)
    file.write_text("policies: [nobody]")
    with pytest.raises(ConfigError, match=r"mine\.yaml:1:12: no policy is called 'nobody'"):
        load_policies(str(file), REGISTRY)
    file.write_text(GOOD)
    assert load_policies(file, REGISTRY).describe() == parse_policies(GOOD, REGISTRY).describe()


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("12", 12),
        ("-3", -3),
        ("1.5", 1.5),
        ("1e3", 1000.0),
        (".5", 0.5),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("yes", "yes"),
        ("off", "off"),
        ("12:30", "12:30"),
        ("010x", "010x"),
        ("0x1F", "0x1F"),
        ("2026-01-02", "2026-01-02"),
        (".inf", ".inf"),
        ("'12'", "12"),
        ('"true"', "true"),
    ],
)
def test_plain_values_mean_what_they_look_like(written: str, value: object) -> None:
    """Numbers, truth and null are what YAML 1.2 says; all else is text."""
    found = read_yaml(f"a: {written}\n", "x").plain()["a"]
    assert found == value
    assert type(found) is type(value)


@given(st.text(max_size=80))
def test_any_text_is_read_or_refused(text: str) -> None:
    """No text makes the reader fail otherwise than by ConfigError."""
    try:
        parse_policies(text, REGISTRY)
    except ConfigError as error:
        assert str(error).startswith("policies.yaml")


def test_missing_library_names_the_extra() -> None:
    """Without PyYAML the package imports, and reading YAML says what to install."""
    code = (
        "import sys; sys.modules['yaml'] = None\n"
        "from leyline_policies.config import parse_policies\n"
        "try: parse_policies('policies: []')\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    command = [sys.executable, "-c", code]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert output.startswith("MissingExtraError")
    assert "pip install pyyaml" in output


def _valid(text: str) -> bool:
    return bool(jsonschema.Draft202012Validator(SCHEMA).is_valid(yaml.safe_load(text)))


def test_schema_is_a_schema() -> None:
    """The generated schema is valid itself and can be written as JSON."""
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert json.loads(json.dumps(SCHEMA)) == SCHEMA


@pytest.mark.parametrize(
    "text",
    [
        GOOD,
        "{}",
        "policies: [keep_all: , drop_failed_calls: {when: 'tokens > 5', dry_run: true}]",
        "policies: [truncate_older_than: {tools: bash}]",
        "policies: [' keep_all ', 'redact:pattern=x']",
        "models: {m: {policies: [truncate_older_than: {tools: null, every: 2}]}}",
    ],
)
def test_schema_takes_what_the_loader_takes(text: str) -> None:
    """A file that can be loaded is valid."""
    parse_policies(text, REGISTRY)
    assert _valid(text)


@pytest.mark.parametrize(
    "text",
    [
        "polices: []",
        "policies: keep_all",
        "policies: [nobody]",
        "policies: [keep_al]",
        "policies: [keep_all_of_it]",
        "policies: [nobody: {}]",
        "policies: [keep_all: {n: 1}]",
        "policies: [truncate_older_than: {n: two}]",
        "policies: [truncate_older_than: {n: 1.5}]",
        "policies: [truncate_older_than: {n: null}]",
        "policies: [truncate_older_than: {tools: [1]}]",
        "policies: [redact: {pattern: 5}]",
        "policies: [{keep_all: {}, redact: {pattern: x}}]",
        "policies: [{}]",
        "tenants: {a: []}",
        "tenants: {a: {}}",
        f"policies: [{'keep_all, ' * 17}]",
    ],
)
def test_schema_refuses_what_the_loader_refuses(text: str) -> None:
    """A file with a wrong name, type or shape is not valid, and can't be loaded."""
    _error(text)
    assert not _valid(text)


def test_broken_plugins_are_left_out_of_the_schema() -> None:
    """A plugin that can't be imported costs its own entry only."""

    def fails() -> object:
        raise ImportError("no torch")

    schema = policy_schema(Registry([*built_in_candidates(), Candidate("bad", "d 1.0", fails)]))
    assert "keep_all" in schema["$defs"]
    assert "bad" not in schema["$defs"]
