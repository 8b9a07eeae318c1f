"""Times the first turn after a compaction against the same prompt fully cached, in the same run.

A scripted model in the embedded engine writes a summary of a history of several thousand tokens.
The harness's next list quotes it, and keeps the end of the history. That list is sent twice: the
first time its parts are spliced, the second time all of it is cached. With `compaction_edits:
exact` the summary and the kept messages are prefilled. `summarize` is the policy: it has the
summary written beside the requests, and the client sends its whole history.

    .venv/bin/python bench/compaction.py --json out/compaction.json
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.scripted_model import (
    SCRIPTED,
    Prompt,
    Reply,
    build_scripted,
    scripted_model,
)
from support.stack import serving

from leyline_proxy.http.app import create_app
from leyline_proxy.settings import Settings
from leyline_proxy.telemetry.logging import configure_logging

ASK = "Summarize the work so far."
MODES = ("amortize", "exact", "summarize")
POLICY = {
    "leyline": {"policy": "summarize:trigger_tokens=1000,keep_messages=2,summary_tokens=1600"}
}
WRITTEN = 'leyline_policy_completions_total{result="written"}'


def words(seed: int, lines: int) -> str:
    """Return a text that no other has a passage of."""
    rng = random.Random(seed)
    made = [["".join(rng.choices("aeilmnorst", k=5)) for _ in range(8)] for _ in range(lines)]
    return "\n".join(f"{' '.join(line)}." for line in made)


SUMMARY = words(1, 40)
GO_ON = {"role": "user", "content": "Go on."}


def script(prompt: Prompt) -> tuple[Reply, bool]:
    """Answer a request for a summary with it, and others with a text of their own."""
    asked = prompt.messages[-1][1]
    task = asked.splitlines()[0]
    answer = (
        SUMMARY
        if asked.startswith("Summarize")
        else f"Done: {task}\n{words(sum(map(ord, task)), 8)}"
    )
    return Reply(answer), True


def ask(
    client: httpx.Client, chat: list[dict[str, str]], session: str, **more: Any
) -> tuple[str, float, Any]:
    """Return a streamed answer's text, its TTFT in ms, and its account."""
    body = {
        "model": SCRIPTED,
        "messages": chat,
        "temperature": 0,
        "max_tokens": 1600,
        "stream": True,
        **more,
    }
    begun, first, text, account = time.perf_counter(), 0.0, "", None
    headers = {"x-leyline-session": session}
    with client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            said = (chunk.get("choices") or [{}])[0].get("delta", {}).get("content") or ""
            if said and not first:
                first = time.perf_counter() - begun
            text, account = text + said, chunk.get("leyline") or account
    return text, 1e3 * first, account


def worked(client: httpx.Client, session: str, rounds: int) -> list[dict[str, str]]:
    """Return the history of a session."""
    chat = [{"role": "system", "content": "You repair programs.\n" + words(2, 60)}]
    for number in range(rounds):
        text = f"Task {session}.{number}\n{words(len(session) * 1000 + number, 40)}"
        chat.append({"role": "user", "content": text})
        chat.append({"role": "assistant", "content": ask(client, chat, session)[0]})
    return chat


def compacted(client: httpx.Client, session: str, rounds: int) -> tuple[Any, Any]:
    """Return TTFT and tokens of the turn after a compaction, and of the same list again."""
    chat = worked(client, session, rounds)
    summary = ask(client, [*chat, {"role": "user", "content": ASK}], session)[0]
    quoting = {"role": "user", "content": f"So far:\n{summary}"}
    return _twice(client, [chat[0], quoting, *chat[-2:], GO_ON], session)


def summarized(client: httpx.Client, session: str, rounds: int) -> tuple[Any, Any]:
    """Return the same of the first turn with a policy's summary."""
    chat, before = worked(client, session, rounds), _summaries(client)
    ask(client, chat, session, **POLICY)
    deadline = time.monotonic() + 60
    while _summaries(client) == before:
        if time.monotonic() > deadline:
            raise TimeoutError("no summary came")
        time.sleep(0.02)
    return _twice(client, [*chat, GO_ON], session, **POLICY)


def _twice(client: httpx.Client, chat: list[dict[str, str]], session: str, **more: Any) -> Any:
    answers = [ask(client, chat, session, **more) for _ in range(2)]
    return tuple((ms, account["tokens"]) for _, ms, account in answers)


def _summaries(client: httpx.Client) -> str:
    lines = client.get("/metrics").text.splitlines()
    return next((line for line in lines if line.startswith(WRITTEN)), "")


def measure(mode: str, files: Path, samples: int, rounds: int) -> dict[str, Any]:
    """Return the figures of one mode."""
    with scripted_model(files, script) as model, serving(model.app) as upstream:
        edits = {"edit_timing": "now"} if mode == "summarize" else {"compaction_edits": mode}
        app = create_app(Settings(upstream=upstream, log_level="error", **edits))
        run = summarized if mode == "summarize" else compacted
        with serving(app) as origin, httpx.Client(base_url=origin, timeout=120) as client:
            run(client, "warm", 2)
            found = [run(client, "s" * (at + 5), rounds) for at in range(samples)]
    first, again = zip(*found, strict=True)
    ttft = statistics.median(ms for ms, _ in first)
    floor = statistics.median(ms for ms, _ in again)
    return {
        "prompt_tokens": statistics.mean(tokens["prompt"] for _, tokens in first),
        "prefilled_tokens": statistics.mean(tokens["prefilled"] for _, tokens in first),
        "ttft_ms": ttft,
        "cached_ttft_ms": floor,
        "ratio": ttft / floor,
    }


def main() -> None:
    """Measure all modes, and print them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=6, help="turns of the history")
    arguments = parser.parse_args()
    configure_logging("error", "console")
    with tempfile.TemporaryDirectory() as folder:
        files = build_scripted(Path(folder) / "model")
        figures = {
            mode: measure(mode, files, arguments.samples, arguments.rounds) for mode in MODES
        }
    for mode, each in figures.items():
        sys.stdout.write(
            f"{mode:9} prompt {each['prompt_tokens']:.0f} tokens, "
            f"prefilled {each['prefilled_tokens']:.0f}; TTFT {each['ttft_ms']:.0f} ms, "
            f"cached {each['cached_ttft_ms']:.0f} ms: {each['ratio']:.2f}\n"
        )
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
