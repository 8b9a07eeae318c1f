"""Agent frameworks that have environments of their own, in small programs of ours."""

from __future__ import annotations

from dataclasses import replace

from client_cases import INSTALLED, Client, library, switched, work
from support.scripted_model import Call


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
        _in_python("crewai", "crewai", "crewai_crew.py", CREWAI_DISABLE_TELEMETRY="true"),
        replace(
            _in_python("semantic-kernel", "semantic-kernel", "semantic_kernel_agent.py"),
            replies=work(
                lambda path, content: Call(
                    "Workbench-write_file", {"path": path, "content": content}
                ),
                lambda command: Call("Workbench-run_command", {"command": command}),
            ),
        ),
        _in_python("dspy", "dspy", "dspy_react.py"),
    )


def _in_python(name: str, package: str, script: str, **switches: str) -> Client:
    prices = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    return library(name, package, "chat", script, venv=name, **prices, **switches)


def _in_node(name: str, package: str, script: str) -> Client:
    """A program in JavaScript, which finds its packages by ``NODE_PATH``."""
    modules = INSTALLED / name / "node_modules"
    client = library(name, package, "chat", script, venv=name, NODE_PATH=str(modules))
    return replace(client, executable=modules / ".bin" / "node")
