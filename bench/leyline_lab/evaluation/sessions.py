"""The sessions of an evaluation: requests as the agent sends them and as a policy edits them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from leyline_lab.fidelity.experiment import EvaluationSessions, SessionStep
from leyline_lab.fidelity.recall_prompts import long_session
from leyline_lab.fidelity.recall_task import TOOLS
from leyline_policies import Policy, load_pipeline
from leyline_proxy.edits.prepare import prepare

from ..demo.run import shipped_trace

POLICY = "truncate_older_than:n=2,max_chars=200"
"""The paper's policy."""
LONG_STEPS = 50
_LONGEST_RESULT = 600
"""Characters of a recorded tool result that are kept. The prompts stay short enough for a CPU,
and the policy cuts two thirds of a long result."""

Messages = Sequence[Mapping[str, Any]]


def evaluation_sessions() -> EvaluationSessions:
    """Return the recorded demo session and a generated one of 50 steps, both under the policy."""
    policies = load_pipeline(POLICY)
    recorded = shipped_trace().sessions[0].requests
    return EvaluationSessions(
        tuple(
            _step(policies, [_shortened(message) for message in request.messages], request.tools)
            for request in recorded
        ),
        tuple(_step(policies, messages, TOOLS) for messages in long_session(LONG_STEPS)),
    )


def _step(policies: Sequence[Policy], messages: Messages, tools: Messages) -> SessionStep:
    plain = tuple(dict(message) for message in messages)
    edited = prepare(plain, policies, (), turn_index=len(plain)).messages
    return SessionStep(plain, tuple(edited), tuple(tools))


def _shortened(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if message.get("role") != "tool" or not isinstance(content, str):
        return dict(message)
    return {**message, "content": content[:_LONGEST_RESULT]}
