"""What the documentation shows works as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from leyline_policies import Registry, load_pipeline
from leyline_policies.builtin.drop_failed_calls import DropFailedCalls
from leyline_policies.builtin.truncate_older_than import TruncateOlderThan
from leyline_policies.config import ConfigError, parse_policies
from leyline_policies.modifiers import MODIFIERS
from leyline_policies.registry import Candidate, built_in_candidates
from leyline_policies.schema import policy_schema
from leyline_policies.testing import RULES, check_policy

TEXT = (Path(__file__).parents[3] / "docs" / "policies.md").read_text(encoding="utf-8")
REGISTRY = Registry(built_in_candidates())


def _blocks(language: str, *, holding: str) -> list[str]:
    """The code blocks of a language that hold a text."""
    blocks = re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)
    return [block for block in blocks if holding in block]


def _run(holding: str, **names: Any) -> dict[str, Any]:
    (block,) = _blocks("python", holding=holding)
    found: dict[str, Any] = {"__name__": "example", **names}
    exec(compile(block, "docs/policies.md", "exec"), found)  # noqa: S102
    return found


def test_every_spec_can_be_loaded() -> None:
    """The specs of the spec language and of the common settings give policies."""
    specs = [
        line
        for block in _blocks("text", holding="truncate_older_than:")
        for line in block.splitlines()
    ]
    assert len(specs) >= 4
    for spec in specs:
        assert load_pipeline(spec, REGISTRY)


def test_settings_of_every_policy_are_listed() -> None:
    """The table names each setting that every policy takes."""
    section = TEXT.split("## When, and on what")[1].split("```")[0]
    assert all(f"`{each.name}`" in section for each in MODIFIERS)


def test_example_file_is_read_and_valid() -> None:
    """The example of a policies file loads, fits the schema, and chooses as is said."""
    (block,) = _blocks("yaml", holding="tenants:")
    found = parse_policies(block, REGISTRY)
    assert [each.name for each in found.choose("team-b", "llama")] == [
        *("clear_tool_uses", "redact", "drop_failed_calls", "truncate_older_than", "keep_all")
    ]
    assert [each.name for each in found.choose("team-a", "qwen3")] == ["keep_all"]
    assert found.choose("team-b", "qwen3") == ()
    jsonschema.validate(yaml.safe_load(block), policy_schema(REGISTRY))
    (message,) = _blocks("text", holding="did you mean 'pattern'")
    with pytest.raises(ConfigError) as caught:
        parse_policies(block.replace("{pattern:", "{patern:"), REGISTRY)
    assert str(caught.value)[:60] == message[:60]


def test_composed_policy_keeps_the_rules() -> None:
    """The policy that is composed in Python can be built and keeps the rules."""
    found = _run(
        "tidy = pipeline", TruncateOlderThan=TruncateOlderThan, DropFailedCalls=DropFailedCalls
    )
    assert check_policy(found["policy"]).policy == "tidy"


def test_first_policy_can_be_registered_and_tested() -> None:
    """The first policy of one's own is found by its name, takes its setting and keeps the rules."""
    function = _run("def short_pastes")["short_pastes"]
    registry = Registry([Candidate("short_pastes", "a test", lambda: function)])
    (policy,) = load_pipeline("short_pastes:limit=20", registry)
    assert check_policy(policy).reclaimed_tokens > 0
    (parameter,) = registry.get("short_pastes").parameters
    assert parameter.help == "characters that stay"


def test_marks_and_context_examples_keep_the_rules() -> None:
    """The policies that mark single edits and keep a state keep the rules, and edit."""
    tidy = _run("def tidy", is_old_screen=lambda m, turn: "image_url" in str(m["content"]))["tidy"]
    assert check_policy(tidy).reclaimed_tokens > 0
    freeze = _run("def freeze", map_text=_run("def short_pastes")["map_text"])["freeze"]
    report = check_policy(freeze)
    assert report.reclaimed_tokens > 0
    assert report.rewrites <= 2 * report.sessions * 3  # once for each long sleep, not every turn


def test_every_rule_of_the_test_kit_is_named() -> None:
    """The section on testing names each rule that is checked."""
    section = TEXT.split("### Testing it")[1]
    assert all(f"`{rule}`" in section for rule in RULES)
