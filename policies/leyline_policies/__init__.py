"""Policies: edits of an agent's history.

`Policy` defines a policy, `load_pipeline` makes policies of a line of text, `Registry` lists those
that there are, and `leyline_policies.conversation` helps to write new ones. The package needs
`google-re2` and `regex` if patterns are used, and nothing else.
"""

from __future__ import annotations

from leyline_policies.context import (
    Context,
    EditCost,
    Note,
    apply,
    approximate_tokens,
    run,
)
from leyline_policies.conversation import ToolCall, map_text, pair_calls, tags_of, text_of
from leyline_policies.errors import (
    NameClashError,
    PluginError,
    PolicyError,
    SpecError,
    UnknownPolicyError,
)
from leyline_policies.kinds import Pattern
from leyline_policies.marks import drop, edit
from leyline_policies.memo import Memo
from leyline_policies.policy import FunctionPolicy, Message, Mode, Policy, function_policy
from leyline_policies.registry import ENTRY_POINT_GROUP, PolicyDefinition, Registry
from leyline_policies.spec import load_pipeline

__all__ = [
    "ENTRY_POINT_GROUP",
    "Context",
    "EditCost",
    "FunctionPolicy",
    "Memo",
    "Message",
    "Mode",
    "NameClashError",
    "Note",
    "Pattern",
    "PluginError",
    "Policy",
    "PolicyDefinition",
    "PolicyError",
    "Registry",
    "SpecError",
    "ToolCall",
    "UnknownPolicyError",
    "apply",
    "approximate_tokens",
    "drop",
    "edit",
    "function_policy",
    "load_pipeline",
    "map_text",
    "pair_calls",
    "run",
    "tags_of",
    "text_of",
]
