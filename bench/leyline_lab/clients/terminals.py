"""More agents that people start from a command line."""

from __future__ import annotations

import json
import os

from ..stand_ins.scripted_model import SCRIPTED, Call
from .cases import INSTALLED, TASK, Client, Files, work
from .stack import KEY, Place


def terminals() -> tuple[Client, ...]:
    """All of them."""
    return (_copilot(), _pi(), _continue(), _cline())


def _path(name: str) -> dict[str, str]:
    """Node of the agent's own folder, if it has one, comes first."""
    own = INSTALLED / name / "node_modules" / ".bin"
    return {"PATH": f"{own}:{os.environ['PATH']}"}


def _copilot() -> Client:
    def environment(place: Place) -> dict[str, str]:
        return {
            "COPILOT_PROVIDER_BASE_URL": f"{place.origin}/v1",
            "COPILOT_PROVIDER_API_KEY": KEY,
            "COPILOT_MODEL": SCRIPTED,
            "COPILOT_OFFLINE": "true",
            "COPILOT_HOME": str(place.home / ".copilot"),
        }

    return Client(
        name="copilot-cli",
        package="@github/copilot",
        api="chat",
        executable=INSTALLED / "copilot" / "node_modules" / ".bin" / "copilot",
        arguments=lambda _: ["-p", TASK, "--allow-all-tools", "--allow-all-paths"],
        environment=environment,
        replies=work(
            lambda path, content: Call("create", {"path": path, "file_text": content}),
            lambda command: Call("bash", {"command": command, "description": "Run it"}),
        ),
        venv="copilot",
    )


def _pi() -> Client:
    def files(place: Place) -> Files:
        provider = {
            "baseUrl": f"{place.origin}/v1",
            "api": "openai-completions",
            "apiKey": KEY,
            "models": [{"id": SCRIPTED}],
        }
        return {".pi/agent/models.json": json.dumps({"providers": {"leyline": provider}})}

    return Client(
        name="pi",
        package="@earendil-works/pi-coding-agent",
        api="chat",
        executable=INSTALLED / "pi" / "node_modules" / ".bin" / "pi",
        arguments=lambda _: ["--offline", "--model", f"leyline/{SCRIPTED}", "-p", TASK],
        environment=lambda _: _path("pi"),
        files=files,
        replies=work(
            lambda path, content: Call("write", {"path": path, "content": content}),
            lambda command: Call("bash", {"command": command}),
        ),
        venv="pi",
    )


_CONTINUE = """\
name: Leyline
version: 1.0.0
schema: v1
models:
  - name: Scripted
    provider: openai
    model: {model}
    apiBase: {origin}/v1
    apiKey: {key}
    roles: [chat]
    capabilities: [tool_use]
"""


def _continue() -> Client:
    def files(place: Place) -> Files:
        text = _CONTINUE.format(model=SCRIPTED, origin=place.origin, key=KEY)
        return {".continue/config.yaml": text}

    def arguments(place: Place) -> list[str]:
        config = place.home / ".continue" / "config.yaml"
        return ["--config", str(config), "--auto", "-p", TASK]

    return Client(
        name="continue",
        package="@continuedev/cli",
        api="chat",
        executable=INSTALLED / "continue" / "node_modules" / ".bin" / "cn",
        arguments=arguments,
        environment=lambda _: {"CONTINUE_TELEMETRY_ENABLED": "0"},
        files=files,
        replies=work(
            lambda path, content: Call("Write", {"filepath": path, "content": content}),
            lambda command: Call("Bash", {"command": command}),
        ),
        venv="continue",
    )


def _cline() -> Client:
    def files(place: Place) -> Files:
        settings = {
            "provider": "openai-compatible",
            "apiKey": KEY,
            "model": SCRIPTED,
            "baseUrl": f"{place.origin}/v1",
        }
        entry = {
            "settings": settings,
            "updatedAt": "2026-01-01T00:00:00.000Z",
            "tokenSource": "manual",
        }
        providers = {
            "version": 1,
            "lastUsedProvider": "openai-compatible",
            "modes": {},
            "providers": {"openai-compatible": entry},
        }
        return {
            ".cline/data/settings/providers.json": json.dumps(providers),
            ".cline/data/settings/global-settings.json": json.dumps(
                {"telemetryOptOut": True, "autoUpdateEnabled": False}
            ),
        }

    return Client(
        name="cline",
        package="cline",
        api="chat",
        executable=INSTALLED / "cline" / "node_modules" / ".bin" / "cline",
        arguments=lambda _: [TASK],
        environment=lambda _: {"CLINE_NO_AUTO_UPDATE": "1", "DO_NOT_TRACK": "1"},
        files=files,
        replies=work(
            lambda path, content: Call("editor", {"path": path, "new_text": content}),
            lambda command: Call("run_commands", {"commands": [command]}),
        ),
        venv="cline",
        # For its feature flags.
        asks=frozenset({"data.cline.bot"}),
    )
