"""Agent frameworks that have environments of their own, in small programs of ours."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..stand_ins.scripted_model import Call, Reply
from .cases import INSTALLED, PRICES, Client, library, switched, work
from .verdict import LAST, MEASURE, NOTES, SHOW, TEXT


def frameworks() -> tuple[Client, ...]:
    """All of them."""
    vercel = _in_node("vercel-ai", "ai", "vercel_ai_sdk.cjs")
    return (
        vercel,
        switched(vercel, "streamed", STREAM="1"),
        _in_node("mastra", "@mastra/core", "mastra_agent.cjs"),
        _in_python("strands", "strands-agents", "strands_agent.py"),
        replace(
            _in_python("deepagents", "deepagents", "deepagents_agent.py"),
            replies=work(
                lambda path, content: Call("write_file", {"file_path": path, "content": content}),
                lambda command: Call("execute", {"command": command}),
            ),
        ),
        _in_python("google-adk", "google-adk", "adk_agent.py"),
        # These two keep only the calls of an answer, and drop the text in front of them.
        replace(
            _in_python("crewai", "crewai", "crewai_crew.py", CREWAI_DISABLE_TELEMETRY="true"),
            appends=False,
        ),
        replace(
            _in_python("semantic-kernel", "semantic-kernel", "semantic_kernel_agent.py"),
            appends=False,
            replies=work(
                lambda path, content: Call(
                    "Workbench-write_file", {"path": path, "content": content}
                ),
                lambda command: Call("Workbench-run_command", {"command": command}),
            ),
        ),
        replace(
            _in_python("dspy", "dspy", "dspy_react.py"),
            replies=_fields,
            # Its one user message grows in the middle.
            appends=False,
            mark="[[ ## observation_",
        ),
        replace(
            _in_python("openhands", "openhands-sdk", "openhands_agent.py"),
            replies=work(
                lambda path, content: Call(
                    "file_editor", {"command": "create", "path": path, "file_text": content}
                ),
                lambda command: Call("terminal", {"command": command}),
            ),
        ),
    )


def _fields(folder: Path) -> tuple[Reply, ...]:
    """dspy: fields of a text, and the answer in a request of its own."""
    steps: tuple[tuple[str, str, dict[str, str]], ...] = (
        ("First the file.", "write_file", {"path": str(folder / NOTES), "content": TEXT}),
        ("Now its size.", "run_command", {"command": MEASURE}),
        ("Now both.", "run_command", {"command": SHOW}),
        ("That was all.", "finish", {}),
    )
    return (
        *(
            _texts(next_thought=thought, next_tool_name=name, next_tool_args=json.dumps(arguments))
            for thought, name, arguments in steps
        ),
        _texts(reasoning="The files were shown.", answer=LAST),
    )


def _texts(**fields: str) -> Reply:
    texts = [f"[[ ## {name} ## ]]\n{text}\n" for name, text in fields.items()]
    return Reply("\n".join((*texts, "[[ ## completed ## ]]")))


def _in_python(name: str, package: str, script: str, **switches: Any) -> Client:
    return library(name, package, "chat", script, venv=name, **PRICES, **switches)


def _in_node(name: str, package: str, script: str) -> Client:
    """A program in JavaScript, which finds its packages by ``NODE_PATH``."""
    modules = INSTALLED / name / "node_modules"
    client = library(name, package, "chat", script, venv=name, NODE_PATH=str(modules))
    return replace(client, executable=modules / ".bin" / "node")
