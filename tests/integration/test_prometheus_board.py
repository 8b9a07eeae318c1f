"""The boards' queries, evaluated by a real Prometheus that scrapes a running stack."""

from __future__ import annotations

import math
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from support import boards

VENV_BIN = Path(sys.executable).parent
START_TIMEOUT_S = 120.0
QUERY_TIMEOUT_S = 30.0
SCRAPE_S = 1.0
TURNS = 6
WINDOW = "20s"
POLICIES = {
    "cut": ["truncate_older_than:n=2,max_chars=60"] * TURNS,
    "redact": ["keep_all"] * (TURNS - 1) + ["redact:pattern=value_0_7"],
}
"""One policy per turn: old tool results are cut as they age; one is redacted at the end."""
VARIABLES = {
    "$__rate_interval": WINDOW,
    "$__range": "10m",
    "$tenant": ".*",
    "$model": ".*",
}
SHORT_SESSIONS = f"the sessions of this test have {TURNS} turns"
LEGITIMATELY_EMPTY = {
    "Hit ratio by turn and tenant/D": SHORT_SESSIONS,
    "Hit ratio by turn and tenant/E": SHORT_SESSIONS,
    "Hit ratio by turn and tenant/F": SHORT_SESSIONS,
    "Policy faults/A": "no policy of this test fails",
    "Engine reachable, receipts missing/B": "the engine answers for every turn",
}


@dataclass(frozen=True, slots=True)
class Traffic:
    """What the callers were told, summed over all their requests."""

    prompt_tokens: int
    cached_tokens: int
    outcomes: frozenset[str]


def _program(name: str) -> str:
    """A program of the Debian package prometheus, from the venv or the system."""
    found = shutil.which(name, path=f"{VENV_BIN}{os.pathsep}{os.environ.get('PATH', '')}")
    if found is None:
        pytest.skip(f"{name} is not installed; `make test` fetches it on Debian")
    return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def _serve(command: list[str], log: Path, ready: str) -> Iterator[None]:
    """Run a server until the caller is done; fails with its output when it doesn't get ready."""
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not _answers(ready):
            if process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"{command[0]} did not get ready:\n{log.read_text()[-4000:]}")
            time.sleep(0.2)
        yield
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Logs, configuration and data of the two servers."""
    return tmp_path_factory.mktemp("board")


@pytest.fixture(scope="module")
def stack(folder: Path) -> Iterator[str]:
    """Address of `leyline serve` with the embedded engine, in a process of its own."""
    port = _free_port()
    url = f"http://127.0.0.1:{port}"
    command = [str(VENV_BIN / "leyline"), "serve", "--port", str(port)]
    server = _serve(command, folder / "leyline.log", f"{url}/readyz")
    next(server)
    yield url
    next(server, None)


@pytest.fixture(scope="module")
def prometheus(folder: Path, stack: str) -> Iterator[str]:
    """Address of a Prometheus server that scrapes the stack once a second."""
    program = _program("prometheus")
    port = _free_port()
    config = folder / "prometheus.yml"
    config.write_text(
        f"global: {{scrape_interval: {SCRAPE_S:g}s}}\n"
        "scrape_configs:\n"
        "  - job_name: leyline\n"
        f"    static_configs: [{{targets: ['{stack.removeprefix('http://')}']}}]\n"
    )
    url = f"http://127.0.0.1:{port}"
    command = [
        program,
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'tsdb'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    server = _serve(command, folder / "prometheus.log", f"{url}/-/ready")
    next(server)
    yield url
    next(server, None)


def _history(turns: int, session: str) -> list[dict[str, Any]]:
    """An agent's message list after ``turns`` tool calls."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You repair small programs. " * 12},
        {"role": "user", "content": f"Find out why the tests of project {session} fail."},
    ]
    for turn in range(turns):
        call = f"call_{turn}"
        function = {"name": "cat", "arguments": f'{{"path": "module_{turn}.py"}}'}
        listing = "\n".join(f"line {n}: value_{turn}_{n} = {n * turn}" for n in range(24))
        messages += [
            {
                "role": "assistant",
                "content": f"I read module {turn}.",
                "tool_calls": [{"id": call, "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": call, "content": listing},
        ]
    return messages


def _run_session(stack: str, session: str, policies: Sequence[str]) -> list[dict[str, Any]]:
    """One agent session, a turn for each of ``policies``; the answers' bodies."""
    model = httpx.get(f"{stack}/v1/models", timeout=30).json()["data"][0]["id"]
    answers = []
    for turn, policy in enumerate(policies):
        response = httpx.post(
            f"{stack}/v1/chat/completions",
            headers={"x-leyline-session": session},
            json={
                "model": model,
                "messages": _history(turn, session),
                "max_tokens": 2,
                "leyline": {"policy": policy},
            },
            timeout=60,
        )
        assert response.status_code == 200, response.text
        answers.append(response.json())
    return answers


def _run_round(stack: str, name: str) -> list[dict[str, Any]]:
    """One session of each kind."""
    return [
        answer
        for kind, policies in POLICIES.items()
        for answer in _run_session(stack, f"{name}-{kind}", policies)
    ]


@pytest.fixture(scope="module")
def traffic(stack: str, prometheus: str) -> Traffic:
    """Two rounds of sessions, with scrapes between: rates need a first value to grow from."""
    answers = _run_round(stack, "first")
    assert _wait(lambda: _instant(prometheus, "sum(leyline_turns_total)") == [len(answers)])
    time.sleep(2 * SCRAPE_S)
    answers += _run_round(stack, "second")
    usages = [answer["usage"] for answer in answers]
    return Traffic(
        sum(usage["prompt_tokens"] for usage in usages),
        sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages),
        frozenset(answer["leyline"]["outcome"] for answer in answers),
    )


def _wait(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + QUERY_TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(SCRAPE_S / 2)
    return True


def _ask(url: str, path: str, **params: str | float) -> list[dict[str, Any]]:
    response = httpx.get(f"{url}/api/v1/{path}", params=params, timeout=30)
    assert response.status_code == 200, response.text
    result: list[dict[str, Any]] = response.json()["data"]["result"]
    return result


def _instant(url: str, expr: str) -> list[float]:
    """The numbers that ``expr`` gives now."""
    found = [float(series["value"][1]) for series in _ask(url, "query", query=expr)]
    return [number for number in found if not math.isnan(number)]


def _substituted(query: boards.PanelQuery) -> str:
    """The query as Grafana sends it."""
    expr = query.expr
    for variable, value in VARIABLES.items():
        expr = expr.replace(variable, value)
    assert "$" not in expr, f"unknown variable in {expr}"
    return expr


def _evaluate(url: str, query: boards.PanelQuery) -> list[float]:
    """The numbers that a panel would draw."""
    expr = _substituted(query)
    if query.instant:
        return _instant(url, expr)
    now = time.time()
    series = _ask(url, "query_range", query=expr, start=now - 90, end=now, step=1)
    found = [float(value) for one in series for _, value in one["values"]]
    return [number for number in found if not math.isnan(number)]


def test_every_panel_shows_data(prometheus: str, traffic: Traffic) -> None:
    """After edited turns each query gives numbers, but for those that say why they don't."""
    queries = list(boards.queries())
    assert set(LEGITIMATELY_EMPTY) <= {query.name for query in queries}, "a stale exception"
    assert {"spliced", "reprefilled"} <= traffic.outcomes
    waiting = {query.name: query for query in queries if query.name not in LEGITIMATELY_EMPTY}

    def all_shown() -> bool:
        for name in [name for name, query in waiting.items() if _evaluate(prometheus, query)]:
            del waiting[name]
        return not waiting

    _wait(all_shown)
    assert not waiting, "no data for " + "; ".join(f"{q.name}: {q.expr}" for q in waiting.values())


def test_exceptions_are_really_empty(prometheus: str, traffic: Traffic) -> None:
    """A query that is excused from showing data shows none: no excuse outlives its cause."""
    queries = {query.name: query for query in boards.queries()}
    shown = [name for name in LEGITIMATELY_EMPTY if _evaluate(prometheus, queries[name])]
    assert not shown


def test_ratios_are_ratios(prometheus: str, traffic: Traffic) -> None:
    """Panels in percent stay between 0 and 1."""
    units = {
        panel["title"]: panel["fieldConfig"]["defaults"].get("unit")
        for path in boards.BOARDS
        for panel in boards.panels(boards.load(path))
    }
    for query in boards.queries():
        if units[query.panel] == "percentunit":
            for number in _evaluate(prometheus, query):
                assert -1e-9 <= number <= 1 + 1e-9, query.name


def test_counters_agree_with_the_answers(prometheus: str, traffic: Traffic) -> None:
    """Prometheus holds the token counts that the callers were told, to the token."""
    metric = "leyline_prompt_tokens_total"

    def scraped() -> bool:
        return _instant(prometheus, f"sum({metric})") == [traffic.prompt_tokens]

    assert _wait(scraped), _instant(prometheus, f"sum by (source) ({metric})")
    reused = _instant(prometheus, f'sum({metric}{{source=~"cached|spliced"}})')
    assert reused == [traffic.cached_tokens]


def test_variables_have_values(prometheus: str, traffic: Traffic) -> None:
    """The boards' drop-down lists for tenant and model are not empty."""
    for text in boards.variable_queries():
        selector, label = text.removeprefix("label_values(").removesuffix(")").rsplit(", ", 1)
        match = selector.replace("$tenant", ".*")
        response = httpx.get(
            f"{prometheus}/api/v1/label/{label}/values", params={"match[]": match}, timeout=30
        )
        assert [value for value in response.json()["data"] if value], text


def test_shipped_configuration_is_valid() -> None:
    """promtool accepts the Prometheus configuration that Compose mounts."""
    config = boards.REPOSITORY / "deploy" / "prometheus.yml"
    result = subprocess.run(
        [_program("promtool"), "check", "config", str(config)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_queries_are_promql() -> None:
    """Every query parses, so that a typing error shows also where the stack can't run."""
    promtool = _program("promtool")
    rules = [
        f"      - record: board:query_{index}\n        expr: >-\n          {_substituted(query)}\n"
        for index, query in enumerate(boards.queries())
    ]
    text = "groups:\n  - name: boards\n    rules:\n" + "".join(rules)
    result = subprocess.run(
        [promtool, "check", "rules", "/dev/stdin"],
        input=text,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
