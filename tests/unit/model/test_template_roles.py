"""Instructions in roles that chat templates show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from leyline_proxy.model.template_roles import (
    TemplateRoles,
    holds_instructions,
    roles_shown,
    strictest,
    written_for,
)
from leyline_proxy.render.template import ChatTemplate

ALL = TemplateRoles()
NO_DEVELOPER = TemplateRoles(developer=False, late_developer=False)
FIRST_ONLY = TemplateRoles(late_developer=False, late_system=False)
STRICT = TemplateRoles(developer=False, late_developer=False, late_system=False)
TAKERS = {
    "GLM-4.6": NO_DEVELOPER,
    "Kimi-K2-Instruct": ALL,
    "Qwen-Qwen2.5-7B-Instruct": NO_DEVELOPER,
    "Qwen-Qwen3-0.6B": NO_DEVELOPER,
    "Qwen3-Coder": ALL,
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": NO_DEVELOPER,
    "deepseek-ai-DeepSeek-V3.1": NO_DEVELOPER,
    "deepseek-ai-DeepSeek-V3.2": NO_DEVELOPER,
    "meta-llama-Llama-3.1-8B-Instruct": ALL,
    "openai-gpt-oss-120b": FIRST_ONLY,
}
USER = {"role": "user", "content": "Go."}


def said(role: str, content: Any = "Be brief.") -> dict[str, Any]:
    """A message."""
    return {"role": role, "content": content, "name": "a"}


def test_what_real_templates_show(templates_dir: Path) -> None:
    """Six of ten leave out a developer's message, and one leaves out what comes after the first."""
    found = {}
    for path in templates_dir.glob("*.jinja"):
        template = ChatTemplate(path.read_text(), {"bos_token": "<s>", "eos_token": "</s>"})
        variables = template.variables(None, True, None)
        found[path.stem] = roles_shown(lambda m, t=template, v=variables: t.render(m, v))
    assert found == TAKERS


def test_a_template_that_takes_no_instructions_changes_nothing() -> None:
    """Its own refusal says so; a reminder in another role would hide it."""

    def render(messages: list[Any]) -> str:
        if any(each["role"] != "user" for each in messages):
            raise RuntimeError("System role not supported")
        return "".join(each["content"] for each in messages)

    assert roles_shown(render) == ALL


REMINDER = {**said("user", "<system-reminder>\nBe brief.\n</system-reminder>")}


@pytest.mark.parametrize(
    ("roles", "message", "first", "later"),
    [
        (ALL, said("developer"), said("developer"), said("developer")),
        (NO_DEVELOPER, said("developer"), said("system"), said("system")),
        (FIRST_ONLY, said("developer"), said("developer"), REMINDER),
        (STRICT, said("developer"), said("system"), REMINDER),
        (NO_DEVELOPER, said("system"), said("system"), said("system")),
        (STRICT, said("system"), said("system"), REMINDER),
        (STRICT, said("tool"), said("tool"), said("tool")),
    ],
)
def test_instructions_keep_their_place(
    roles: TemplateRoles, message: Any, first: Any, later: Any
) -> None:
    """A message that isn't shown has another role, and nothing else of the list changes; a list
    without one is the very same."""
    assert written_for([message, USER, message], roles) == [first, USER, later]
    unchanged = [message, USER] if first == message else [USER]
    assert written_for(unchanged, roles) is unchanged


def test_parts_are_framed_and_nonsense_is_kept() -> None:
    """Parts stay as they are between those of the frame; what is no message is refused later."""
    part = {"type": "text", "text": "Be brief."}
    (_, changed) = written_for([USER, said("system", [part])], STRICT)
    assert changed["content"][1] == part
    assert "".join(each["text"] for each in changed["content"]) == REMINDER["content"]
    for nonsense in (None, "a", [None, 3, {}], [USER, said("system", None)]):
        assert written_for(nonsense, STRICT) in (nonsense, [USER, said("user", None)])


def test_the_strictest_of_several_engines_counts() -> None:
    """Any of them may get the turn."""
    assert strictest([]) == ALL
    assert strictest([ALL, NO_DEVELOPER, FIRST_ONLY]) == STRICT


def test_most_bodies_are_known_to_need_nothing() -> None:
    """Only those are decoded that have a developer's message, or a system message after others."""
    first, user, late = '{"role": "system", "content": "\\"system\\""}', "{}", '{"role":"system"}'
    for messages, holds in (
        ([first, user], False),
        ([user], False),
        ([user, late], True),
        ([first, user, late], True),
        (['{"role":"developer"}'], True),
    ):
        body = f'{{"model": "m", "messages": [{", ".join(messages)}]}}'
        assert holds_instructions(body.encode()) is holds, messages
