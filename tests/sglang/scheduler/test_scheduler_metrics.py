"""A scheduler's counts on SGLang's ``/metrics``, and the times when it looks."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from census_kit import Seen
from claim_scheduler import ClaimScheduler, opens, text
from prometheus_client import CollectorRegistry
from scheduler_kit import Scheduler, source_of

from leyline_engine.contract import (
    Directive,
    EditPayload,
    SourceRef,
    apply_directives,
    token_digest,
)
from leyline_engine.energy import (
    ENERGY_VARIABLE,
    EnergyAccount,
    EnergyUnavailableError,
    open_account,
)
from leyline_engine.metrics import NoMetrics, PrometheusMetrics
from leyline_engine.sglang import plugin
from leyline_engine.sglang.metrics import Readings, open_metrics

pytestmark = pytest.mark.usefixtures("server_args")


@pytest.mark.parametrize(("enabled", "rank"), [(False, 0), (True, 1)])
def test_nothing_is_counted_twice_or_unasked(enabled: bool, rank: int) -> None:
    """Without ``--enable-metrics``, and on ranks that repeat rank 0's work, nothing is defined."""
    metrics = open_metrics(enabled=enabled, attn_tp_rank=rank)
    assert isinstance(metrics, NoMetrics)
    assert not metrics.collects


def owners(scheduler: Scheduler) -> dict[str, int]:
    scheduler.engine.readings.read()
    assert scheduler.seen.levels is not None
    return scheduler.seen.levels.by_owner()


def edited(tokens: list[int], directive: Directive) -> tuple[list[int], EditPayload]:
    """The next turn of session ``s``: the last one with an edit."""
    source = SourceRef("t1", len(tokens), token_digest(tokens))
    payload = opens("s", "t2", sources=(source,), directives=(directive,))
    return [*apply_directives(tokens, (directive,)), *text("more", 10)], payload


def test_a_splice_shows_what_it_copied_and_where_it_lies() -> None:
    """Bytes are those of the copied rows; the text after the edit is spliced, not exact."""
    scheduler = Scheduler(1000)
    req, _ = scheduler.serve(text("a", 200), opens("s"))
    first = list(source_of(req))
    assert owners(scheduler) == {
        "exact": len(first) - 1,
        "spliced": 0,
        "claimed": 0,
        "in_flight": 0,
        "free": 1001 - len(first),
    }
    assert scheduler.seen.remembered.turns == 1
    assert scheduler.seen.remembered.tokens == len(first)
    prompt, payload = edited(first, Directive(60, 80, (1, 2)))
    req, record = scheduler.serve(prompt, payload)
    assert record is not None
    spliced = record.receipt.tokens.spliced
    assert spliced > 100
    bytes_per_token = sum(buffer[0].nbytes for buffer in scheduler.pool.kv_buffer)
    assert scheduler.seen.copied_bytes == spliced * bytes_per_token
    behind = record.receipt.lineage[0].start
    now = owners(scheduler)
    assert now["spliced"] == len(source_of(req)) - 1 - behind
    assert sum(now.values()) == 1000
    assert scheduler.seen.remembered.lineages == 1
    scheduler.flush()
    assert owners(scheduler)["free"] == 1000
    assert scheduler.seen.remembered.turns == 0


def test_a_claim_owns_what_it_holds_and_a_refusal_counts() -> None:
    """Claimed slots are no longer the tree's; who doesn't fit beside them is counted once."""
    scheduler = ClaimScheduler(200)
    scheduler.serve(text("a", 120), opens("s"))
    before = owners(scheduler)
    scheduler.claim("s", 100)
    now = owners(scheduler)
    assert now["claimed"] == 100
    assert now["exact"] == before["exact"] - 100
    scheduler.submit(text("b", 150), opens("other"))
    scheduler.drain()
    assert scheduler.seen.refusals == 1
    scheduler.release()
    assert owners(scheduler)["claimed"] == 0


def test_evictions_count_and_the_peak_stays() -> None:
    """Tokens that made room, and the fullest that the pool was, whatever was freed since."""
    scheduler = Scheduler(200)
    for name in "abc":
        scheduler.serve(text(name, 90))
    assert owners(scheduler)["exact"] <= 200
    assert scheduler.seen.evicted_tokens >= 70
    scheduler.flush()
    scheduler.engine.readings.read()
    assert scheduler.seen.levels is not None
    assert scheduler.seen.levels.peak >= 180
    assert scheduler.seen.levels.free == 200


class Counting(Seen):
    """Counts the readings of levels."""

    def __init__(self) -> None:
        super().__init__()
        self.readings = 0

    def registries(self, levels: Any) -> None:
        self.readings += 1


def test_levels_are_read_once_a_second_and_when_the_scheduler_falls_idle() -> None:
    """They aren't read at each forward, but twice at the end, as the last batch may end a step
    later."""
    engine, metrics, clock = Scheduler(100).engine, Counting(), [10.0]
    readings = Readings(
        metrics,
        engine.registry,
        engine.ledger,
        engine.claims.keeper,
        census=None,
        now_s=lambda: clock[0],
    )
    batch = SimpleNamespace(reqs=[])
    for _ in range(50):
        readings.stepped(batch)
    assert metrics.readings == 1
    clock[0] += 1.0
    readings.stepped(batch)
    readings.stepped(batch)
    assert metrics.readings == 2
    for _ in range(50):
        readings.stepped(None)
    assert metrics.readings == 4
    clock[0] += 1.0
    readings.stepped(None)
    assert metrics.readings == 5


def test_energy_is_shared_by_what_each_batch_computes() -> None:
    """Prompts count by their chunk, running answers by a token; reported once the request has
    ended."""
    engine, joules, shares = Scheduler(100).engine, [0.0], []

    class Shares(Seen):
        def request_energy(self, joules: float) -> None:
            shares.append(joules)

    metrics = Shares()
    readings = Readings(
        metrics,
        engine.registry,
        engine.ledger,
        engine.claims.keeper,
        census=None,
        energy=EnergyAccount(SimpleNamespace(joules=lambda: joules[0]), metrics),
        now_s=lambda: -1.0,
    )
    readings.read()
    prompt, answer = (SimpleNamespace(rid=name, finished=lambda: True) for name in "pa")
    extend, decode = (SimpleNamespace(is_extend=lambda kind=kind: kind) for kind in (True, False))
    readings.stepped(
        SimpleNamespace(reqs=[prompt, answer], extend_lens=[8, 1], forward_mode=extend)
    )
    readings.stepped(SimpleNamespace(reqs=[answer], extend_lens=None, forward_mode=decode))
    joules[0] = 20.0
    readings.released(prompt)
    readings.released(answer)
    readings.read()
    assert shares == pytest.approx([16.0, 4.0])
    # One that was retracted ends where it waits.
    retracted = SimpleNamespace(rid="r", finished=lambda: False)
    readings.stepped(SimpleNamespace(reqs=[retracted], extend_lens=[9], forward_mode=extend))
    readings.released(retracted)
    joules[0] = 25.0
    readings.read()
    assert len(shares) == 2
    engine.readings = readings
    engine.dropped("r")
    readings.read()
    assert shares == pytest.approx([16.0, 4.0, 5.0])


def test_a_step_that_cannot_be_counted_stops_no_scheduler(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """If the pool, the batch or the levels can't be read, it is logged."""
    scheduler = Scheduler(100)
    engine = scheduler.engine

    class Lost:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("lost")

    readings = Readings(
        Seen(),
        engine.registry,
        engine.ledger,
        engine.claims.keeper,
        census=Lost(),  # type: ignore[arg-type]
        energy=EnergyAccount(SimpleNamespace(joules=lambda: 0.0), Seen()),
    )
    readings.stepped(SimpleNamespace(reqs=[]))
    failures = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert [record.getMessage() for record in failures] == [
        "Leyline failed while counting a step",
        "Leyline failed while reading levels",
    ]


@pytest.mark.parametrize(("ranks", "gpus"), [(1, [4]), (2, [4, 6]), (4, [4, 6, 8, 10])])
def test_a_scheduler_counts_the_energy_of_its_own_ranks(ranks: int, gpus: list[int]) -> None:
    """With data-parallel attention others count beside it: no GPU twice."""
    context = SimpleNamespace(
        tp_worker=SimpleNamespace(gpu_id=4), server_args=SimpleNamespace(gpu_id_step=2), tp_size=8
    )
    assert list(plugin._gpus(context, ranks)) == gpus


def test_the_real_nvml_says_that_there_is_no_gpu() -> None:
    """A scheduler that insists on energy gets its error at the start; by default it does
    without."""
    metrics = PrometheusMetrics(CollectorRegistry())
    assert open_account(metrics, lambda: ["GPU-none"], environment={}) is None
    with pytest.raises(EnergyUnavailableError, match="NVML"):
        open_account(metrics, lambda: ["GPU-none"], environment={ENERGY_VARIABLE: "on"})
