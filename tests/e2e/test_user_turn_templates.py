"""Published templates on the real engine, through the proxy: loops, and users who speak again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest

from leyline_lab.engines.sglang import SGLANG, sglang_server
from leyline_lab.engines.stack import StackOptions, running_stack
from leyline_lab.errors import EngineProcessError
from leyline_lab.replay.unchanged import lcs_length
from leyline_replay.models.trained import THINKING_MODEL_NAME, trained_model_dir

STRIPPING = ("GLM-4.6", "Qwen-Qwen3-0.6B", "deepseek-ai-DeepSeek-V3.2", "openai-gpt-oss-120b")
APPENDING = (
    "Qwen-Qwen2.5-7B-Instruct",
    "Qwen3-Coder",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
    "deepseek-ai-DeepSeek-V3.1",
    "meta-llama-Llama-3.1-8B-Instruct",
)
"""Templates that show no thinking of earlier answers; Kimi-K2-Instruct's takes no calls here."""
USER_TURNS = 3
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "read",
            "description": "Reads a file.",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
        },
    }
]
FINAL = {"role": "assistant", "content": "It was file 3.", "reasoning_content": "So it is."}
nightly = pytest.mark.nightly
Chat = list[dict[str, Any]]


def step(number: int) -> Chat:
    """A thought with a call, and the tool's output."""
    words = f"Thought {number}: " + " ".join(f"step {number * 31 + i}" for i in range(12))
    function = {"name": "read", "arguments": json.dumps({"path": f"file{number}.py"})}
    call = {"id": f"call_{number}", "type": "function", "function": function}
    thinking = {"reasoning_content": words, "thinking": words}
    output = "\n".join(f"{number}.{line} = {line * number % 97}" for line in range(8))
    return [
        {"role": "assistant", "content": "", "tool_calls": [call], **thinking},
        {"role": "tool", "tool_call_id": f"call_{number}", "content": output},
    ]


def with_template(name: str, templates: Path, folder: Path) -> Path:
    """The model that ships, with another chat template."""
    shipped = trained_model_dir(THINKING_MODEL_NAME)
    assert shipped is not None
    shutil.copytree(shipped, folder)
    template = (templates / f"{name}.jinja").read_text("utf-8")
    (folder / "chat_template.jinja").write_text(template, "utf-8")
    return folder


@pytest.mark.parametrize(
    ("name", "calls"),
    [
        ("Qwen-Qwen3-0.6B", 20),
        *(pytest.param(name, 20, marks=nightly) for name in (*STRIPPING, *APPENDING)),
        *(pytest.param(name, 100, marks=nightly) for name in STRIPPING),
    ],
)
def test_each_user_turn_prefills_only_what_is_new(
    name: str, calls: int, templates_dir: Path, tmp_path: Path
) -> None:
    """By the engine's own receipts: changed and new tokens, and at most 1 % of the prompt more."""
    folder = with_template(name, templates_dir, tmp_path / "thinker")
    play(StackOptions(model=str(folder)), "thinker", calls, strips=name in STRIPPING)


@pytest.mark.nightly
@pytest.mark.parametrize("name", [*STRIPPING, *APPENDING])
def test_each_user_turn_prefills_only_what_is_new_on_sglang(
    name: str, templates_dir: Path, tmp_path: Path
) -> None:
    """The same on a real server of each template; its bench has loops of 100 calls."""
    try:
        SGLANG.python()
    except EngineProcessError:
        pytest.skip("SGLang isn't installed here: make sglang-setup")
    folder = with_template(name, templates_dir, tmp_path / "thinker")
    flags = ["--served-model-name=thinker", "--max-total-tokens=131072"]
    with sglang_server(folder, tmp_path / "log", flags) as server:
        # SGLang leaves out the member ``thinking``, which gpt-oss' template reads.
        strips = name in STRIPPING and not name.startswith("openai")
        play(StackOptions(engine_url=server.url), "thinker", 20, strips=strips)


def play(options: StackOptions, model: str, calls: int, *, strips: bool) -> None:
    """Loops with the user's message after each, against the goals."""
    with (
        running_stack(options, splice=True) as stack,
        httpx.Client(base_url=stack.origin, timeout=600) as client,
    ):
        chat: Chat = [{"role": "system", "content": "You repair."}]
        held: list[int] = []
        for turn in range(USER_TURNS):
            chat.append({"role": "user", "content": f"Task {turn}: why are the tests red?"})
            account = asked(client, model, chat)
            if held:
                check(account["tokens"], held, list(stack.last_prompt()))
                assert (account["tokens"]["spliced"] > 0) == strips
                causes = {edit["cause"] for edit in account["edits"] if edit["mode"] == "amortize"}
                assert causes == ({"template"} if strips else set())
            chat += [each for number in range(calls) for each in step(turn * calls + number)]
            asked(client, model, chat)
            held = list(stack.last_prompt())
            chat.append(FINAL)


def check(tokens: dict[str, int], held: list[int], prompt: list[int]) -> None:
    """The goals, against the last prompt of the loop."""
    unchanged = lcs_length(held, prompt)
    assert tokens["prompt"] == len(prompt)
    assert tokens["prefilled"] <= len(prompt) - unchanged + 0.01 * len(prompt), (tokens, unchanged)
    assert len(prompt) - tokens["prefilled"] >= 0.99 * unchanged, (tokens, unchanged)


def asked(client: httpx.Client, model: str, chat: Chat) -> dict[str, Any]:
    """The account of one turn."""
    thinks = {"chat_template_kwargs": {"thinking": True}}
    answer = client.post(
        "/v1/chat/completions",
        json={"model": model, "messages": chat, "tools": TOOLS, "max_tokens": 1, **thinks},
        headers={"x-leyline-session": "loops"},
    )
    assert answer.status_code == 200, answer.text
    account: dict[str, Any] = answer.json()["leyline"]
    return account
