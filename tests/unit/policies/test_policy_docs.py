"""The documentation's examples work as written."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import jsonschema
import pytest
import yaml

from leyline_policies import Message, Registry, load_pipeline
from leyline_policies.builtin import BUILTINS
from leyline_policies.builtin.detectors import KEYS, PII
from leyline_policies.builtin.drop_failed_calls import DropFailedCalls
from leyline_policies.builtin.truncate_older_than import TruncateOlderThan
from leyline_policies.config import ConfigError, parse_policies
from leyline_policies.conversation import ToolCall, pair_calls
from leyline_policies.modifiers import MODIFIERS
from leyline_policies.registry import Candidate, built_in_candidates
from leyline_policies.schema import policy_schema
from leyline_policies.testing import RULES, check_policy
from leyline_proxy.model.prepared import Fault
from leyline_proxy.request.annotations import Annotation, annotations_of
from leyline_proxy.request.context_management import parse_context_management
from leyline_proxy.settings import Settings

DOCS = Path(__file__).parents[3] / "docs"
TEXT = (DOCS / "policies.md").read_text(encoding="utf-8")
WRITING = (DOCS / "writing-policies.md").read_text(encoding="utf-8")
REGISTRY = Registry(built_in_candidates())


def _blocks(language: str, *, holding: str) -> list[str]:
    """The code blocks of a language that hold a text."""
    blocks = re.findall(rf"```{language}\n(.*?)```", TEXT + WRITING, re.DOTALL)
    return [block for block in blocks if holding in block]


def _run(holding: str, **names: Any) -> dict[str, Any]:
    (block,) = _blocks("python", holding=holding)
    found: dict[str, Any] = {"__name__": "example", **names}
    exec(compile(block, "docs", "exec"), found)  # noqa: S102
    return found


def _section(title: str) -> str:
    """The text under a heading of the page on using policies."""
    return TEXT.split(f"\n{title}\n")[1].split("\n## ")[0]


def _rows(text: str) -> dict[str, str]:
    """The lines of tables by the name in their first cell."""
    return dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", text, re.MULTILINE))


def test_every_spec_can_be_loaded() -> None:
    """The specs of the spec language, the common settings and the table of figures give policies,
    and so does the one on the command line."""
    blocks = [*_blocks("text", holding="truncate_older_than:"), *_blocks("text", holding="prune:")]
    specs = [line for block in blocks for line in block.splitlines()]
    specs += re.findall(r'--policy "([^"]+)"', TEXT)
    assert len(specs) >= 10
    for spec in specs:
        assert load_pipeline(spec, REGISTRY)


def test_every_built_in_policy_is_listed_with_its_parameters() -> None:
    """The list is by name, with the defaults of numbers and of switches."""
    rows = _rows(_section("## Built in").split("\n### ")[0])
    assert rows.keys() >= BUILTINS.keys()
    for name in BUILTINS:
        for each in REGISTRY.get(name).parameters:
            assert f"`{each.name}`" in rows[name], name
            if isinstance(each.default, int | float):
                shown = f"`{each.name}` ({str(each.default).lower()})"
                assert shown in rows[name], shown


def test_every_detector_is_listed() -> None:
    """It is listed under the group that it belongs to, those of keys in their own table."""
    rows = _rows(_section("## Built in").split("\n### ")[0])
    table = _section("### Keys, tokens and passwords").split("\n### ")[0]
    assert [*_rows(table)] == [*KEYS]
    assert re.findall(r"\w+", rows["pii"]) == [*PII]


def test_verbs_on_messages_are_listed_and_understood() -> None:
    """All members of the annotation are in the table, and the example is one."""
    section = _section("## Verbs on messages")
    assert _rows(section).keys() == set(Annotation.__struct_fields__)
    (block,) = re.findall(r"```json\n(.*?)```", section, re.DOTALL)
    (found,) = annotations_of([json.loads(block)]).values()
    assert found.decay is not None and found.decay.turns == 3


def test_requested_edits_are_understood() -> None:
    """The example of ``context_management`` asks for two edits."""
    request, _ = re.findall(r"```json\n(.*?)```", _section("## `context_management`"), re.DOTALL)
    edits = parse_context_management(json.loads(request)["context_management"]).policies
    assert [edit.name for edit in edits] == ["clear_thinking_20251015", "clear_tool_uses_20250919"]


def test_settings_of_the_scheduler_are_listed_with_their_defaults() -> None:
    """The page lists those of the proxy."""
    rows = _rows(_section("## When edits are sent"))
    fields = {name: f for name, f in Settings.model_fields.items() if name.startswith("edit_")}
    assert rows.keys() == fields.keys()
    for name, field in fields.items():
        assert rows[name].split(" | ")[0].strip("`") == str(field.default)


def test_every_fault_is_explained() -> None:
    """The page has neither more nor fewer than the proxy distinguishes."""
    assert _rows(_section("## When a policy fails")).keys() == set(get_args(Fault))


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


@pytest.mark.filterwarnings("ignore::leyline_policies.testing.NothingEditedWarning")
def test_a_function_is_tested_with_settings() -> None:
    """The test of the first policy with settings passes, and fails without their effect."""
    function = _run("def short_pastes")["short_pastes"]
    test = "test_the_rules_are_kept_with_settings"
    _run(f"def {test}", short_pastes=function)[test]()
    with pytest.raises(AssertionError):
        _run(f"def {test}", short_pastes=lambda messages, turn_idx, *, limit=1: messages)[test]()


def test_the_fields_of_a_call_are_listed_and_read() -> None:
    """The table has the fields of `ToolCall`, and the example reads a call's arguments, whatever a
    model wrote."""
    section = WRITING.split("## Messages and tool calls")[1].split("\n## ")[0]
    assert [*_rows(section)][-4:] == [each.name for each in fields(ToolCall)]
    path_of = _run("def path_of")["path_of"]
    told = [
        {"id": str(place), "type": "function", "function": {"name": "read", "arguments": text}}
        for place, text in enumerate(('{"path": "a.py"}', "{", "[1]", '{"line": 3}'))
    ]
    messages: list[Message] = [{"role": "assistant", "content": None, "tool_calls": told}]
    messages.append({"role": "assistant", "content": None, "function_call": {"name": "read"}})
    calls = pair_calls(messages)
    assert [path_of(messages, call) for call in calls] == ["a.py", None, None, None, None]


def test_marks_and_context_examples_keep_the_rules() -> None:
    """The policies that mark single edits and keep a state keep the rules, and edit."""
    tidy = _run("def tidy", is_old_screen=lambda m, turn: "image_url" in str(m["content"]))["tidy"]
    assert check_policy(tidy).reclaimed_tokens > 0
    freeze = _run("def freeze", map_text=_run("def short_pastes")["map_text"])["freeze"]
    report = check_policy(freeze)
    assert report.reclaimed_tokens > 0
    assert report.rewrites <= 2 * report.sessions * 3  # once for each long sleep, not every turn


@pytest.mark.filterwarnings("ignore::leyline_policies.testing.NothingEditedWarning")
def test_verbs_example_keeps_the_rules() -> None:
    """A policy that says what should become of messages changes nothing else of them."""
    keep = _run("def keep_the_plan")["keep_the_plan"]
    messages = [{"role": "user", "name": "plan", "content": "x"}, {"role": "user", "content": "y"}]
    assert [m.get("leyline") for m in keep(messages, 0)] == [{"pin": True}, None]
    assert check_policy(keep).edited_turns == 0


def test_every_rule_of_the_test_kit_is_named() -> None:
    """The section on testing names each rule that is checked."""
    section = WRITING.split("\n## Testing it\n")[1]
    assert all(f"`{rule}`" in section for rule in RULES)


def test_the_guide_names_the_settings_that_every_policy_takes() -> None:
    """An author learns all reserved names where settings are explained, in their order."""
    (told,) = re.findall(r"Every policy takes (.*?)besides its own settings", WRITING, re.DOTALL)
    assert re.findall(r"`(\w+)`", told) == [each.name for each in MODIFIERS]
