"""A tiny agent that plays tasks over ``OPENAI_BASE_URL`` and writes results as benchmarks do.

It runs as a process of its own and edits no history. Result files have the members and places that
the benchmarks' own sources give them: debug-gym 1.3.0 (``build_trajectory`` in
``debug_gym/agents/base_agent.py``, ``TaskProgress`` in ``debug_gym/logger.py``), LOCA-bench 8cd474d
(``run_single_task`` in ``inference/run_react.py``), The Complexity Trap bf15b5f
(``_run_instance`` in ``sweagent/run/run_batch.py``) with the report of swebench 4.1.0
(``make_run_report`` in ``swebench/harness/reporting.py``).
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import httpx

TASKS = ("alpha", "beta")
ANSWERS = {"alpha": "41", "beta": "42"}
STEPS = 4
TOOL = {
    "type": "function",
    "function": {"name": "read", "parameters": {"type": "object", "properties": {}}},
}
OPENING = "You read pages one by one, then say the number of the last page. Task: "
CRASH = "AGENT_CRASHES_BEFORE"
"""Variable: the agent ends with an error in front of this task."""
WAIT = "AGENT_WAITS_BEFORE"
"""Variable: the agent writes its process id in front of this task, and sleeps."""


def page(task: str, step: int) -> str:
    """A page; the last one shows the task's answer."""
    lines = "\n".join(f"{task} page {step} line {line}: nothing of note" for line in range(14))
    shown = f"\nnumber={ANSWERS[task]}" if step == STEPS - 1 else ""
    return f"{lines}{shown}"


def play(client: httpx.Client, task: str) -> bool:
    """Play one task; True if the model's last message has the answer."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": OPENING + task}]
    for step in range(STEPS + 1):
        body = {
            "model": os.environ["BENCH_MODEL"],
            "messages": messages,
            "tools": [TOOL],
            "temperature": 0,
            "max_tokens": 64,
        }
        answer = client.post("/chat/completions", json=body)
        answer.raise_for_status()
        message = answer.json()["choices"][0]["message"]
        calls = message.get("tool_calls")
        if not calls:
            return ANSWERS[task] in (message.get("content") or "")
        messages.append(message)
        messages.append(
            {"role": "tool", "tool_call_id": calls[0]["id"], "content": page(task, step)}
        )
    return False


def write(path: Path, value: object) -> None:
    """Write JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def record(results: Path, task: str, solved: bool) -> None:
    """Write a task's files of all three benchmarks."""
    state = "resolved" if solved else "unresolved"
    progress = {"problem_id": task, "step": STEPS, "total_steps": 50, "score": int(solved)}
    write(
        results / task / f"{task}_status.json",
        {**progress, "max_score": 1, "status": state, "logdir": str(results / task)},
    )
    write(
        results / task / "trajectory.json",
        {"problem": task, "config": {}, "tools": [], "uuid": "results", "success": solved}
        | {"log": [], "agent_type": "FroggyAgent", "logger": ""},
    )
    scored = {"status": "success", "accuracy": float(solved), "steps": STEPS, "feedback": ""}
    write(results / "tasks" / task / "state0" / "eval.json", scored)
    write(results / task / f"{task}.config.yaml", {})


def report(folder: Path, solved: dict[str, bool]) -> None:
    """Write the report of SWE-bench's harness."""
    resolved = [task for task, done in solved.items() if done]
    ids = sorted(solved)
    write(
        folder / "results.leyline.json",
        {
            "total_instances": 500,
            "submitted_instances": len(ids),
            "completed_instances": len(ids),
            "resolved_instances": len(resolved),
            "unresolved_instances": len(ids) - len(resolved),
            "empty_patch_instances": 0,
            "error_instances": 0,
            "completed_ids": ids,
            "incomplete_ids": [],
            "empty_patch_ids": [],
            "submitted_ids": ids,
            "resolved_ids": resolved,
            "unresolved_ids": [task for task in ids if task not in resolved],
            "error_ids": [],
            "schema_version": 2,
        },
    )


def main() -> None:
    """Play the tasks that have no result yet."""
    folder = Path(os.environ["BENCH_FOLDER"])
    results = folder / "results"
    played = folder / "played.txt"
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    assert not [name for name in os.environ if name.startswith("LEYLINE_")]
    solved: dict[str, bool] = {}
    base = os.environ["OPENAI_BASE_URL"]
    with httpx.Client(base_url=base, headers=headers, timeout=60) as client:
        for task in TASKS:
            if task == os.environ.get(CRASH):
                sys.exit(f"out of memory at {task}")
            if task == os.environ.get(WAIT):
                (folder / "agent.pid").write_text(str(os.getpid()))
                time.sleep(600)
            done = results / task / "trajectory.json"
            if done.exists():
                solved[task] = json.loads(done.read_text())["success"]
                continue
            solved[task] = play(client, task)
            record(results, task, solved[task])
            with played.open("a") as log:
                log.write(f"{task}\n")
    report(folder, solved)


if __name__ == "__main__":
    main()
