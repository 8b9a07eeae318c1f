"""Energy by request, over an NVML of which only the interface is real: no GPU is needed."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from support.replay_engine import admit, prefill, random_tokens, tiny_model

from leyline_engine.energy import (
    ENERGY_VARIABLE,
    EnergyAccount,
    EnergyUnavailableError,
    NvmlMeter,
    open_account,
)
from leyline_engine.metrics import NoMetrics, PrometheusMetrics
from leyline_replay.engine import ReplayEngine
from leyline_replay.models.loader import LoadedModel

GPUS = ["GPU-1", "GPU-2"]


class FakeNvml:
    """Two GPUs, whose counters a test moves; in millijoules, as NVML's."""

    class NVMLError(Exception):
        """A stand-in for ``pynvml.NVMLError``."""

    def __init__(self) -> None:
        self.counters = dict.fromkeys(GPUS, 1_000_000)
        self.fault = ""

    def nvmlInit(self) -> None:  # noqa: N802
        self._check("init")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        if uuid not in self.counters:
            raise self.NVMLError("Not Found")
        return uuid

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:  # noqa: N802
        self._check("read")
        return self.counters[handle]

    def use(self, joules: float) -> None:
        """Both GPUs use half of it."""
        for gpu in GPUS:
            self.counters[gpu] += round(joules * 500)

    def _check(self, what: str) -> None:
        if self.fault == what:
            raise self.NVMLError("Not Supported")


class Tally(NoMetrics):
    """Keeps the energy reported to it."""

    def __init__(self) -> None:
        self.used = 0.0
        self.requests: list[float] = []

    def energy(self, joules: float) -> None:
        self.used += joules

    def request_energy(self, joules: float) -> None:
        self.requests.append(joules)


@pytest.fixture
def nvml() -> FakeNvml:
    return FakeNvml()


@pytest.fixture
def tally() -> Tally:
    return Tally()


@pytest.fixture
def account(nvml: FakeNvml, tally: Tally) -> EnergyAccount:
    return EnergyAccount(NvmlMeter(nvml, GPUS), tally)


def test_a_window_is_shared_by_tokens(nvml: FakeNvml, tally: Tally, account: EnergyAccount) -> None:
    """A request is reported once, when it has ended, with its part of every window it computed
    in."""
    account.computed("a", 300)
    account.computed("b", 100)
    nvml.use(40.0)
    account.settle()
    assert (tally.used, tally.requests) == (40.0, [])
    account.computed("b", 5)
    account.ended("a")
    account.ended("b")
    nvml.use(2.0)
    account.settle()
    assert tally.used == 42.0
    assert tally.requests == pytest.approx([30.0, 12.0])
    assert sum(tally.requests) == pytest.approx(tally.used)


def test_idle_power_is_nobodys(nvml: FakeNvml, tally: Tally, account: EnergyAccount) -> None:
    """It counts in total; a request that computed nothing has no share."""
    nvml.use(7.0)
    account.ended("never ran")
    account.settle()
    assert (tally.used, tally.requests) == (7.0, [])


def test_a_request_pays_for_no_idle_hours_before_it(
    nvml: FakeNvml, tally: Tally, account: EnergyAccount
) -> None:
    """An idle engine reads nothing: its use meanwhile counts in total, and for no request."""
    for name in ("a", "b"):
        nvml.use(250_000.0)
        account.computed(name, 10)
        nvml.use(5.0)
        account.ended(name)
        account.settle()
    assert tally.used == 500_010.0
    assert tally.requests == pytest.approx([5.0, 5.0])


def test_a_forward_without_tokens_has_no_share(
    nvml: FakeNvml, tally: Tally, account: EnergyAccount
) -> None:
    """A window in which only such forwards ran counts for no request."""
    account.computed("a", 0)
    nvml.use(3.0)
    account.ended("a")
    account.settle()
    assert (tally.used, tally.requests) == (3.0, [])


def test_a_counter_that_began_anew_takes_nothing_back(
    nvml: FakeNvml, tally: Tally, account: EnergyAccount
) -> None:
    """After a driver was loaded again, the first window counts nothing."""
    nvml.counters = dict.fromkeys(GPUS, 0)
    account.settle()
    nvml.use(3.0)
    account.settle()
    assert tally.used == 3.0


def test_a_gpu_that_stops_answering_ends_the_count(
    nvml: FakeNvml, tally: Tally, account: EnergyAccount, caplog: pytest.LogCaptureFixture
) -> None:
    """It is said once, and nothing fails."""
    nvml.fault = "read"
    with caplog.at_level(logging.WARNING):
        account.settle()
        account.settle()
    assert len(caplog.records) == 1
    nvml.fault = ""
    account.computed("a", 1)
    account.settle()
    assert tally.used == 0


@pytest.mark.parametrize("error", [FakeNvml.NVMLError("GPU is lost"), OSError("no library")])
@pytest.mark.parametrize("window", ["open", "closed"])
def test_after_a_gpu_was_lost_nothing_is_kept_of_requests(
    nvml: FakeNvml,
    account: EnergyAccount,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    window: str,
) -> None:
    """No call fails and memory doesn't grow, however and whenever it is lost."""
    account.computed("a", 1)
    if window == "closed":
        account.settle()

    def lost(handle: str) -> int:
        raise error

    monkeypatch.setattr(nvml, "nvmlDeviceGetTotalEnergyConsumption", lost)
    for number in range(100):
        account.computed(f"b{number}", 1)
        account.ended(f"b{number}")
        account.settle()
    assert not (account._computed or account._shares or account._ended)


def test_what_is_followed_is_bounded(
    nvml: FakeNvml, account: EnergyAccount, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of requests whose end is never reported, the first are dropped."""
    monkeypatch.setattr("leyline_engine.energy._MOST_REQUESTS", 3)
    for number in range(9):
        account.computed(str(number), 1)
        account.settle()
    assert list(account._shares) == ["6", "7", "8"]


def opened(wish: str | None, nvml: FakeNvml, gpus: list[str], **more: Any) -> EnergyAccount | None:
    environment = {} if wish is None else {ENERGY_VARIABLE: wish}
    metrics = PrometheusMetrics(CollectorRegistry())
    options: dict[str, Any] = {"environment": environment, "library": lambda: nvml} | more
    return open_account(metrics, lambda: gpus, **options)


@pytest.mark.parametrize("wish", [None, "", "auto", "on"])
def test_energy_is_counted_where_it_can_be_read(wish: str | None, nvml: FakeNvml) -> None:
    """It is counted unless it is switched off."""
    assert opened(wish, nvml, GPUS) is not None
    assert opened("off", nvml, GPUS) is None


@pytest.mark.parametrize(("fault", "gpus"), [("init", GPUS), ("read", GPUS), ("", ["GPU-9"])])
def test_where_it_cannot_be_read_only_the_insistent_fail(
    fault: str, gpus: list[str], nvml: FakeNvml
) -> None:
    """No driver, a GPU without the counter, an unknown GPU: ``on`` says why, ``auto`` continues."""
    nvml.fault = fault
    assert opened("auto", nvml, gpus) is None
    with pytest.raises(EnergyUnavailableError, match="NVML: Not"):
        opened("on", nvml, gpus)


def test_what_goes_wrong_otherwise_stops_only_the_insistent(nvml: FakeNvml) -> None:
    """A torch that can't name its GPUs is an example."""

    def nameless() -> list[str]:
        raise AttributeError("uuid")

    metrics = PrometheusMetrics(CollectorRegistry())
    assert open_account(metrics, nameless, environment={}, library=lambda: nvml) is None
    with pytest.raises(AttributeError):
        open_account(metrics, nameless, environment={ENERGY_VARIABLE: "on"}, library=lambda: nvml)


def test_without_a_gpu_there_is_nothing_to_read(nvml: FakeNvml) -> None:
    """An engine on a CPU counts no energy; ``on`` gets an error."""
    assert opened(None, nvml, []) is None
    with pytest.raises(EnergyUnavailableError, match="no NVIDIA GPU"):
        opened("on", nvml, [])


def test_an_unknown_wish_is_named(nvml: FakeNvml) -> None:
    """The message names the variable and what it may be."""
    with pytest.raises(ValueError, match="LEYLINE_ENERGY is off, on or auto"):
        opened("yes", nvml, GPUS)


def test_an_engines_requests_share_what_it_used(
    nvml: FakeNvml, tally: Tally, account: EnergyAccount
) -> None:
    """Each has a share by the tokens that the model computed for it: prompt, and output that was
    fed back."""
    loaded = LoadedModel("tiny", tiny_model(), None, "f" * 32, "")  # type: ignore[arg-type]
    engine = ReplayEngine(loaded, pool_tokens=600, metrics=tally, energy=account)
    for length, seed in ((100, 1), (50, 2)):
        sequence = admit(engine, random_tokens(length, seed))
        prefill(sequence)
        sequence.finish()
    nvml.use(30.0)
    engine.read_levels()
    assert tally.requests == pytest.approx([20.0, 10.0])
