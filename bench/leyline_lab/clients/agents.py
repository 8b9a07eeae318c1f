"""Agents that people start from a command line, with what keeps them from calling home."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from ..stand_ins.scripted_model import SCRIPTED, Call, Reply
from .cases import INSTALLED, TASK, Client, Files, libraries, work
from .frameworks import frameworks
from .stack import KEY, Place
from .terminals import terminals
from .verdict import LAST, MEASURE, NOTES, SHOW, TEXT


def clients() -> tuple[Client, ...]:
    """All of them."""
    claude = _claude()
    return (
        *libraries(),
        *frameworks(),
        _mini(),
        claude,
        _searching(claude),
        _opencode(),
        _codex(),
        _codex(websockets=True),
        _aider(),
        _qwen(),
        *terminals(),
    )


def _node(name: str, binary: str) -> Path:
    return INSTALLED / name / "node_modules" / ".bin" / binary


def _claude() -> Client:
    def environment(place: Place) -> dict[str, str]:
        return {
            "ANTHROPIC_BASE_URL": place.origin,
            "ANTHROPIC_API_KEY": KEY,
            "ANTHROPIC_MODEL": SCRIPTED,
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": SCRIPTED,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "CLAUDE_CONFIG_DIR": str(place.home / ".claude"),
            "DISABLE_AUTOUPDATER": "1",
            # It runs what it likes as root only where a setting says that nothing can be broken.
            "IS_SANDBOX": "1",
        }

    return Client(
        name="claude-code",
        package="@anthropic-ai/claude-code",
        api="messages",
        executable=_node("claude-code", "claude"),
        arguments=lambda _: ["-p", TASK, "--dangerously-skip-permissions"],
        environment=environment,
        replies=work(
            lambda path, content: Call("Write", {"file_path": path, "content": content}),
            lambda command: Call("Bash", {"command": command, "description": "Run it"}),
        ),
        venv="claude-code",
    )


def _searching(claude: Client) -> Client:
    """Claude Code loads a tool that wasn't in its first prompt."""
    search = Call("ToolSearch", {"query": "select:WebFetch", "max_results": 5})

    def replies(folder: Path) -> tuple[Reply, ...]:
        return (Reply("Which tools are there?", (search,)), *claude.replies(folder))

    # The list of tools precedes the conversation, and has one more then.
    return replace(claude, name="claude-code, tool search", replies=replies, appends=False)


def _opencode() -> Client:
    def environment(place: Place) -> dict[str, str]:
        limit = {"context": 200_000, "output": 8192}
        provider = {
            "npm": "@ai-sdk/openai-compatible",
            "name": "Leyline",
            "options": {"baseURL": f"{place.origin}/v1", "apiKey": KEY},
            "models": {SCRIPTED: {"name": "Scripted", "limit": limit}},
        }
        config = {
            "provider": {"leyline": provider},
            "model": f"leyline/{SCRIPTED}",
            "small_model": f"leyline/{SCRIPTED}",
            "autoupdate": False,
            "share": "disabled",
            "permission": "allow",
        }
        return {
            "OPENCODE_CONFIG_CONTENT": json.dumps(config),
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
            "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
        }

    return Client(
        name="opencode",
        package="opencode-ai",
        api="chat",
        executable=_node("opencode", "opencode"),
        arguments=lambda _: ["run", TASK],
        environment=environment,
        # Else it asks npm's registry for the types of plugins at every start.
        files=lambda _: {
            ".npmrc": "registry=http://127.0.0.1:9/\noffline=true\nfetch-retries=0\n",
        },
        replies=work(
            lambda path, content: Call("write", {"filePath": path, "content": content}),
            lambda command: Call("bash", {"command": command, "description": "Run it"}),
        ),
        venv="opencode",
    )


_CODEX = """\
model = "{model}"
model_provider = "leyline"
check_for_update_on_startup = false

[model_providers.leyline]
name = "Leyline"
base_url = "{origin}/v1"
env_key = "LEYLINE_KEY"
wire_api = "responses"
supports_websockets = {websockets}

[analytics]
enabled = false

[features]
apps = false
plugins = false
remote_plugin = false
"""


def _codex(*, websockets: bool = False) -> Client:
    def files(place: Place) -> Files:
        told = {"model": SCRIPTED, "origin": place.origin, "websockets": str(websockets).lower()}
        return {".codex/config.toml": _CODEX.format(**told)}

    def arguments(_: Place) -> list[str]:
        free = "--dangerously-bypass-approvals-and-sandbox"
        return ["exec", "--skip-git-repo-check", free, TASK]

    def run(command: str) -> Call:
        return Call("exec_command", {"cmd": command})

    return Client(
        name="codex, WebSocket" if websockets else "codex",
        package="@openai/codex",
        api="responses",
        executable=_node("codex", "codex"),
        arguments=arguments,
        environment=lambda place: {
            "CODEX_HOME": str(place.home / ".codex"),
            "LEYLINE_KEY": KEY,
        },
        files=files,
        replies=work(lambda path, content: run(f"printf {content!r} > {path}"), run),
        venv="codex",
        websocket=websockets,
    )


def _qwen() -> Client:
    def environment(place: Place) -> dict[str, str]:
        return {
            "OPENAI_BASE_URL": f"{place.origin}/v1",
            "OPENAI_API_KEY": KEY,
            "OPENAI_MODEL": SCRIPTED,
        }

    settings = {
        "privacy": {"usageStatisticsEnabled": False},
        "telemetry": {"enabled": False},
        "general": {"disableAutoUpdate": True, "enableAutoUpdate": False},
        "security": {"auth": {"selectedType": "openai"}},
    }
    return Client(
        name="qwen-code",
        package="@qwen-code/qwen-code",
        api="chat",
        executable=_node("qwen-code", "qwen"),
        arguments=lambda _: ["--approval-mode", "yolo", "-p", TASK],
        environment=environment,
        files=lambda _: {".qwen/settings.json": json.dumps(settings)},
        replies=work(
            lambda path, content: Call("write_file", {"file_path": path, "content": content}),
            lambda command: Call("run_shell_command", {"command": command, "is_background": False}),
        ),
        venv="qwen-code",
    )


def _mini() -> Client:
    def environment(place: Place) -> dict[str, str]:
        return {
            "OPENAI_API_BASE": f"{place.origin}/v1",
            "OPENAI_API_KEY": KEY,
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "MSWEA_GLOBAL_CONFIG_DIR": str(place.home / ".mini"),
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        }

    def arguments(place: Place) -> list[str]:
        told = ["-t", TASK, "-m", f"openai/{SCRIPTED}", "--yolo", "--exit-immediately"]
        return [*told, "-l", "0", "-o", str(place.home / "trajectory.json")]

    def bash(command: str) -> Call:
        return Call("bash", {"command": command})

    def replies(folder: Path) -> tuple[Reply, ...]:
        steps = work(lambda path, content: bash(f"printf {content!r} > {path}"), bash)(folder)
        done = bash(f"echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && echo '{LAST}'")
        return (*steps[:-1], Reply("", (done,)))

    return Client(
        name="mini-swe-agent",
        package="mini-swe-agent",
        api="chat",
        executable=INSTALLED / "mini-swe-agent" / "bin" / "mini",
        arguments=arguments,
        environment=environment,
        replies=replies,
        venv="mini-swe-agent",
    )


def _aider() -> Client:
    """It has no tools: it writes files from the answer, and what a test prints is the next turn."""

    def arguments(_: Place) -> list[str]:
        switches = ["--yes-always", "--no-git", "--no-check-update", "--analytics-disable"]
        quiet = ["--no-show-model-warnings", "--no-show-release-notes", "--no-pretty"]
        check = f"{MEASURE}; {SHOW}; grep -q cache {NOTES}"
        model = ["--model", f"openai/{SCRIPTED}", "--edit-format", "whole", "--map-tokens", "0"]
        told = ["--no-auto-lint", "--auto-test", "--test-cmd", check, "--message", TASK, NOTES]
        return [*switches, *quiet, *model, *told]

    def environment(place: Place) -> dict[str, str]:
        return {
            "OPENAI_API_BASE": f"{place.origin}/v1",
            "OPENAI_API_KEY": KEY,
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        }

    def replies(_: Path) -> tuple[Reply, ...]:
        texts = ("leyline\n", "leyline keeps\n", TEXT)
        return tuple(Reply(f"{LAST}\n\n{NOTES}\n```\n{text}```") for text in texts)

    window = {"max_input_tokens": 200_000, "max_output_tokens": 8192, "mode": "chat"}
    prices = json.dumps({f"openai/{SCRIPTED}": {"litellm_provider": "openai", **window}})
    return Client(
        name="aider",
        package="aider-chat",
        api="chat",
        executable=INSTALLED / "aider" / "bin" / "aider",
        arguments=arguments,
        environment=environment,
        # What it would fetch otherwise.
        files=lambda _: {".aider/caches/model_prices_and_context_window.json": prices},
        replies=replies,
        venv="aider",
        # The files it works on are in the middle of its prompts.
        appends=False,
    )
