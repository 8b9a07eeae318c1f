"""The boards' queries and the alerts, evaluated by a real Prometheus that scrapes a stack."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest
import yaml
from support import boards
from support.observed_stack import SCRAPES_S, TURNS, Stack, Told, cause_trouble, run_round
from support.prometheus import (
    WINDOW,
    Prometheus,
    eventually,
    prometheus,
    promtool,
)

VARIABLES = {
    "$__rate_interval": WINDOW,
    "$__range": "10m",
    "$tenant": ".*",
    "$model": ".*",
    "$upstream": ".*",
    "$instance": ".*",
}
DEFAULT = " or vector(0)"
SHORT_SESSIONS = f"the sessions of this test have {TURNS} turns"
NO_GPU = "no GPU that NVML could read"
LEGITIMATELY_EMPTY = {
    "cache-hit: Hit ratio by turn and tenant/D": SHORT_SESSIONS,
    "cache-hit: Hit ratio by turn and tenant/E": SHORT_SESSIONS,
    "cache-hit: Hit ratio by turn and tenant/F": SHORT_SESSIONS,
    "engine: Energy of a request/A": NO_GPU,
    "engine: Energy of a request/B": NO_GPU,
}
WRONG = {
    "LeylineCacheBusts": "sessions rewrite their history",
    "LeylineClaimRefusals": "a request doesn't fit beside a hard claim",
    "LeylineFallbackRate": "sessions are cut on the turn after their engine died",
    "LeylineForgetsPending": "an engine that had the sessions is gone",
    "LeylineKeyReloadRefused": "a line of the key file is wrong",
    "LeylinePolicyFaults": "a pattern takes too long",
    "LeylinePolicyRefusals": "a pattern takes too long, and its policy forgets",
    "LeylinePolicyReloadRefused": "a policy in the file doesn't exist",
    "LeylineRequestsLimited": "the blue tenant asks more often than it may",
    "LeylineUpstreamDown": "an engine is gone",
}
EITHER = {
    "LeylineCacheDiscrepancy": "what the small pool evicts depends on the order of turns",
    "LeylineCircuitOpen": "three requests in a row may fail before the engine is known to be gone",
    "LeylineErrorRate": "refusals are few or many, as the rounds fall into the window",
    "LeylineProxyDown": "a scrape may take longer than the second that it has here",
    "LeylineProxySlow": "the machine may have other things to do",
    "LeylineQueueGrowing": "more callers than the red tenant may have at once",
}
"""Alerts that depend on how fast the machine is."""


@dataclass(frozen=True, slots=True)
class Observed:
    """The run's events, as Prometheus saw them and as the callers did."""

    prometheus: Prometheus
    told: Told


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Observed]:
    """A stack after two rounds of load, with scrapes between, and after things went wrong."""
    folder = tmp_path_factory.mktemp("board")
    with ExitStack() as resources:
        stack = Stack(resources, folder)
        engines = [_address(origin) for origin in stack.origins.values()]
        targets = {"leyline": [_address(stack.url)], "sglang": engines}
        server = resources.enter_context(prometheus(folder, targets))
        run_round(stack, "first")
        assert eventually(lambda: server.one("sum(leyline_turns_total)") > len(stack.told.answers))
        time.sleep(SCRAPES_S)
        run_round(stack, "second")
        cause_trouble(stack)
        yield Observed(server, stack.told)


def _address(origin: str) -> str:
    return origin.removeprefix("http://")


def _substituted(expr: str, *, defaults: bool = False) -> str:
    """The query as Grafana sends it, less what makes a 0 of nothing unless `defaults`."""
    expr = expr if defaults else expr.replace(DEFAULT, "")
    for variable, value in VARIABLES.items():
        expr = expr.replace(variable, value)
    assert "$" not in expr, f"unknown variable in {expr}"
    return expr


def _evaluate(server: Prometheus, query: boards.PanelQuery) -> list[float]:
    return server.drawn(_substituted(query.expr), instant=query.instant)


def _shown(server: Prometheus, queries: Iterable[boards.PanelQuery]) -> dict[str, list[float]]:
    """The result of each query, but for those with a reason to be empty; all others give
    something."""
    waiting = {query.name: query for query in queries if query.name not in LEGITIMATELY_EMPTY}
    found: dict[str, list[float]] = {}

    def all_shown() -> bool:
        for name, query in list(waiting.items()):
            if numbers := _evaluate(server, query):
                found[name] = numbers
                del waiting[name]
        return not waiting

    eventually(all_shown, 15)
    assert not waiting, "no data for " + "; ".join(f"{q.name}: {q.expr}" for q in waiting.values())
    return found


def test_every_panel_shows_data(observed: Observed) -> None:
    """Each query gives numbers, but for those that say why they don't."""
    queries = list(boards.queries())
    assert set(LEGITIMATELY_EMPTY) <= {query.name for query in queries}, "a stale exception"
    _shown(observed.prometheus, queries)


def test_exceptions_are_really_empty(observed: Observed) -> None:
    """A query that is excused from showing data shows none: no excuse outlives its cause."""
    queries = {query.name: query for query in boards.queries()}
    shown = [name for name in LEGITIMATELY_EMPTY if _evaluate(observed.prometheus, queries[name])]
    assert not shown


def test_ratios_are_ratios(observed: Observed) -> None:
    """Panels in percent show something, and stay between 0 and 1."""
    units = {
        (path.stem, panel["title"]): panel["fieldConfig"]["defaults"].get("unit")
        for path in boards.BOARDS
        for panel in boards.panels(boards.load(path))
    }
    ratios = [each for each in boards.queries() if units[each.board, each.panel] == "percentunit"]
    assert ratios
    for name, numbers in _shown(observed.prometheus, ratios).items():
        assert all(-1e-9 <= number <= 1 + 1e-9 for number in numbers), name


def test_counters_agree_with_the_answers(observed: Observed) -> None:
    """Prometheus holds the counts that the callers received, to the token."""
    server, told = observed.prometheus, observed.told
    tokens, by_engine = "leyline_prompt_tokens_total", "leyline_upstream_prompt_tokens_total"
    served = 'source=~"cached|spliced|reused"'
    expected = {
        f"sum({tokens})": told.usage("prompt_tokens"),
        f"sum({tokens}{{{served}}})": told.cached(),
        f'sum({tokens}{{source="spliced"}})': told.tokens("spliced"),
        f'sum({tokens}{{source="reused"}})': told.tokens("reused"),
        'sum(leyline_reuse_tokens_total{mode="live"})': told.reuse("live"),
        'sum(leyline_reuse_tokens_total{mode="observe"})': told.reuse("observe"),
        "sum(leyline_reuse_gated_total)": told.gated(),
        f"sum({by_engine})": told.usage("prompt_tokens"),
        f"sum({by_engine}{{{served}}})": told.cached(),
        "sum(leyline_completion_tokens_total)": told.usage("completion_tokens"),
        "sum(leyline_freed_tokens_total)": told.tokens("freed"),
        "sum(leyline_turns_total)": len(told.answers) + told.refused,
        "sum(leyline_upstream_turns_total)": len(told.answers),
        "sum(leyline_limited_requests_total)": told.limited,
        "sum(leyline_claim_refusals_total)": told.refused,
        "sum(leyline_policy_faults_total)": told.faults(),
        "sum(leyline_policy_refusals_total)": told.failed_closed,
    }
    assert min(expected.values()) > 0, "something of this didn't happen"

    def scraped() -> dict[str, float]:
        return {expr: server.one(expr) for expr in expected}

    eventually(lambda: scraped() == expected, 10)
    assert scraped() == expected


def test_defaults_stand_for_nothing_that_is_there(observed: Observed) -> None:
    """A query that shows 0 where nothing was counted shows the same as without it elsewhere."""
    with_default = [query for query in boards.queries() if DEFAULT in query.expr]

    def differing() -> list[str]:
        scraped = time.time() - SCRAPES_S  # no sample of then is still on its way
        return [
            query.name
            for query in with_default
            if len({_result(query.expr, scraped, defaults=kept) for kept in (True, False)}) > 1
        ]

    def _result(expr: str, at: float, *, defaults: bool) -> str:
        text = _substituted(expr, defaults=defaults)
        return str(observed.prometheus.get("query", query=text, time=at)["result"])

    assert with_default
    assert eventually(lambda: not differing(), 10), differing()


def test_faults_and_refusals_are_added(observed: Observed) -> None:
    """The board's number of faults counts the policies left out and the requests refused."""
    (query,) = (each for each in boards.queries() if each.panel == "Policy faults since start")
    told = observed.told
    assert min(told.faults(), told.failed_closed) > 0
    failures = told.faults() + told.failed_closed
    assert eventually(
        lambda: observed.prometheus.one(_substituted(query.expr, defaults=True)) == failures
    )


def test_pools_add_up(observed: Observed) -> None:
    """The slots of an engine's pool add up to its size, whoever owns them, at every scrape."""
    owned, capacity = "leyline_engine_pool_tokens", "leyline_engine_pool_capacity_tokens"
    missing = f"sum by (instance) ({capacity}) - sum by (instance) ({owned})"
    found = observed.prometheus.drawn(missing, instant=False)
    assert found
    assert not any(found)


@pytest.mark.nightly
def test_boards_can_be_drawn(observed: Observed, tmp_path: Path) -> None:
    """The script that draws boards makes a picture of what Prometheus has, with all its panels."""
    script = boards.REPOSITORY / "grafana" / "draw_board.py"
    picture = tmp_path / "new" / "board.png"
    subprocess.run(
        [sys.executable, script, "cache-hit", observed.prometheus.url, picture, "--minutes", "2"],
        check=True,
        timeout=60,
    )
    colors = np.unique(plt.imread(picture).reshape(-1, 4), axis=0)
    assert len(colors) > 100, "hardly anything was drawn"


def test_variables_have_values(observed: Observed) -> None:
    """The boards' drop-down lists are not empty."""
    for text in boards.variable_queries():
        selector, label = text.removeprefix("label_values(").removesuffix(")").rsplit(", ", 1)
        match = selector.replace("$tenant", ".*")
        values = observed.prometheus.get(f"label/{label}/values", **{"match[]": match})
        assert [value for value in values if value], text


def test_marks_are_set(observed: Observed) -> None:
    """New proxies and firing alerts are marked on the boards' time axis."""
    for expr in boards.annotation_queries():
        assert observed.prometheus.series(expr), expr


def test_exemplars_lead_to_a_turn(observed: Observed) -> None:
    """The slow turns that panels mark have a name to look for, and nothing else."""
    now = time.time()
    metric = "leyline_ttft_seconds_bucket"
    found = observed.prometheus.get("query_exemplars", query=metric, start=now - 300, end=now)
    labels = {frozenset(each["labels"]) for series in found for each in series["exemplars"]}
    assert labels
    assert labels <= {frozenset({"message_id"}), frozenset({"trace_id"})}


def test_rules_are_evaluated(observed: Observed) -> None:
    """Prometheus loads every rule that is shipped, and none fails."""
    groups = observed.prometheus.get("rules")["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert [rule["name"] for rule in rules if rule["health"] != "ok"] == []
    shipped = [alert.name for alert in boards.alerts()]
    assert sorted(rule["name"] for rule in rules) == sorted(2 * shipped)


def test_what_is_wrong_fires_and_nothing_else(observed: Observed) -> None:
    """Of the alerts, those whose cause was there have fired, and no other."""
    names = {alert.name for alert in boards.alerts()}
    assert names > WRONG.keys() | EITHER.keys(), "a stale name"
    fired = 'max_over_time(ALERTS{hurried="yes",alertstate="firing"}[10m])'

    def seen() -> set[str]:
        answer = observed.prometheus.get("query", query=fired)["result"]
        return {series["metric"]["alertname"] for series in answer}

    eventually(lambda: seen() >= WRONG.keys(), 15)
    assert seen() - EITHER.keys() == WRONG.keys()


def test_alerts_tell_what_they_are_about(observed: Observed) -> None:
    """Every text of a firing alert is filled in."""
    alerts = observed.prometheus.get("alerts")["alerts"]
    assert alerts
    for alert in alerts:
        for text in alert["annotations"].values():
            assert text
            assert "<no value>" not in text, alert
            assert "<error" not in text, alert


def test_shipped_configuration_is_valid() -> None:
    """promtool accepts the configuration that Compose mounts, and the rules that it names."""
    promtool("check", "config", boards.REPOSITORY / "deploy" / "prometheus.yml")
    assert boards.RULES
    promtool("check", "rules", *boards.RULES)


@pytest.mark.parametrize("path", boards.RULE_TESTS, ids=lambda path: path.stem)
def test_alerts_fire_when_they_should(path: Path) -> None:
    """Each alert fires after its time for what is bad, and not for what is good beside it."""
    promtool("test", "rules", path)


def test_every_alert_is_tested() -> None:
    """Each alert has a case in which it fires, and one of its own in which something doesn't."""
    names, fired = {alert.name for alert in boards.alerts()}, set()
    for path in boards.RULE_TESTS:
        for case in yaml.safe_load(path.read_text())["tests"]:
            samples = [test.get("exp_samples", []) for test in case["promql_expr_test"]]
            good = any("good" in each["series"] for each in case["input_series"])
            assert good or not all(samples), case["name"]
            labels = " ".join(sample["labels"] for sample in chain.from_iterable(samples))
            fired |= {name for name in names if f'alertname="{name}"' in labels}
    assert fired == names


def test_queries_are_promql() -> None:
    """Every query parses, so that a typing error shows also where the stack can't run."""
    rules = [
        f"      - record: board:query_{index}\n        expr: >-\n          {_substituted(expr)}\n"
        for index, expr in enumerate(query.expr for query in boards.queries())
    ]
    text = "groups:\n  - name: boards\n    rules:\n" + "".join(rules)
    promtool("check", "rules", "/dev/stdin", text=text)
