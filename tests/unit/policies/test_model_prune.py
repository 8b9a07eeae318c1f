"""Results that the agent's model names."""

from __future__ import annotations

import json
from typing import Any

import pytest

from leyline_policies import Context, Message
from leyline_policies.builtin.model_prune import TOOL, ModelPrune
from leyline_policies.context import apply

PLACEHOLDER = ModelPrune().placeholder


def call(number: int, name: str = "ls", arguments: Any = "{}") -> list[Message]:
    """A call and its result."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    function = {"name": name, "arguments": text}
    made = {"id": f"c{number}", "type": "function", "function": function}
    return [
        {"role": "assistant", "content": None, "tool_calls": [made]},
        {"role": "tool", "tool_call_id": f"c{number}", "content": f"output {number}"},
    ]


def results(policy: ModelPrune, messages: list[Message]) -> list[str]:
    """The results as they are sent."""
    sent = apply(policy, messages, 0, Context(slot="0"))
    return [str(message["content"]) for message in sent if message["role"] == "tool"]


START: list[Message] = [{"role": "user", "content": "go"}]


def test_results_are_numbered_so_that_the_model_can_name_them() -> None:
    """The numbers run from the first on, and are the same on every turn."""
    two = [*START, *call(1), *call(2)]
    assert results(ModelPrune(), two) == ["output 1\n\n[result 1]", "output 2\n\n[result 2]"]
    assert results(ModelPrune(label=False), two) == ["output 1", "output 2"]


def test_what_the_model_names_is_cleared() -> None:
    """It is cleared from the next turn on; the call of the tool and its answer stay."""
    arguments = {"results": [1, 3]}
    asked = [*START, *call(1), *call(2), *call(3), *call(4, "prune_context", arguments), *call(5)]
    assert results(ModelPrune(label=False), asked) == [
        PLACEHOLDER,
        "output 2",
        PLACEHOLDER,
        "output 4",
        "output 5",
    ]


@pytest.mark.parametrize(
    "arguments",
    [
        "no json",
        [1],
        {"results": 1},
        {"results": ["1", 1.0, True, None, 0, -1]},
        {"results": [2]},
        {"results": [3]},
        {"other": [1]},
    ],
)
def test_what_means_nothing_clears_nothing(arguments: Any) -> None:
    """Malformed arguments, the tool's own answer, and results that weren't there yet."""
    messages = [*START, *call(1), *call(2, "prune_context", arguments), *call(3)]
    assert results(ModelPrune(label=False), messages) == ["output 1", "output 2", "output 3"]


def test_some_tools_are_spared() -> None:
    """They are, whatever the model says."""
    messages = [*START, *call(1, "skill"), *call(2, "prune_context", {"results": [1]})]
    policy = ModelPrune(label=False, exclude_tools=("skill",))
    assert results(policy, messages) == ["output 1", "output 2"]


def test_the_tool_that_a_harness_offers_is_the_one_that_is_read() -> None:
    """Its name and its parameter."""
    assert TOOL["function"]["name"] == ModelPrune().tool
    assert list(TOOL["function"]["parameters"]["properties"]) == ["results"]
