"""Energy by request: the GPUs' use, shared by the tokens computed meanwhile. An estimate.

A window opens with the first token computed in it, and ends when levels are read, about a second
later. The energy used in it is shared among the requests that computed in it, by their tokens. So a
prompt's token counts as much as a generated one, and idle power within the window is shared, too;
energy used between two windows belongs to no request.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from leyline_engine.metrics import EngineMetrics

log = logging.getLogger(__name__)

ENERGY_VARIABLE = "LEYLINE_ENERGY"
"""Environment variable: ``off``, ``on`` (or the engine doesn't start) or ``auto``, the default."""

_MOST_REQUESTS = 16_384
"""Maximum number of requests that are followed; of more, the oldest are dropped."""

_JOULES = 1e-3
"""Joules in NVML's unit, the millijoule."""


class EnergyUnavailableError(RuntimeError):
    """Energy can't be read; the message says why."""


class EnergyMeter(Protocol):
    """A reading that only grows."""

    def joules(self) -> float:
        """Return the energy used since any fixed moment.

        Raises:
            EnergyUnavailableError: it can't be read any more.
        """


class Nvml(Protocol):
    """The part of NVML's own Python library, ``pynvml``, that is used."""

    NVMLError: type[Exception]

    def nvmlInit(self) -> None: ...  # noqa: N802 - the library's own names
    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Any: ...  # noqa: N802
    def nvmlDeviceGetTotalEnergyConsumption(self, handle: Any) -> int: ...  # noqa: N802


class NvmlMeter:
    """The energy counters of some GPUs, together.

    Args:
        library: ``pynvml``.
        devices: the GPUs' UUIDs, as NVML writes them.

    Raises:
        EnergyUnavailableError: no driver, an unknown GPU, or one that doesn't count energy.
    """

    def __init__(self, library: Nvml, devices: Sequence[str]) -> None:
        self._library = library
        try:
            library.nvmlInit()
            self._handles = [library.nvmlDeviceGetHandleByUUID(uuid) for uuid in devices]
        except library.NVMLError as error:
            raise EnergyUnavailableError(f"NVML: {error}") from error
        self.joules()

    def joules(self) -> float:
        """Return the sum of the counters; see :class:`EnergyMeter`."""
        read = self._library.nvmlDeviceGetTotalEnergyConsumption
        try:
            return sum(read(handle) for handle in self._handles) * _JOULES
        except self._library.NVMLError as error:
            raise EnergyUnavailableError(f"NVML: {error}") from error


class EnergyAccount:
    """Shares of requests. The engine's thread drives it.

    Args:
        meter: read when a window opens, and at each :meth:`settle`.
        metrics: records what was used.
    """

    def __init__(self, meter: EnergyMeter, metrics: EngineMetrics) -> None:
        self._meter: EnergyMeter | None = meter
        self._metrics = metrics
        self._read = meter.joules()
        self._computed: dict[str, int] = {}
        self._shares: dict[str, float] = {}
        self._ended: list[str] = []

    def computed(self, request: str, tokens: int) -> None:
        """Record that a request computes that many tokens. Called before it does."""
        if tokens <= 0:
            return
        if not self._computed:
            self._advance()  # no request's: the engine may have been idle for hours
        if self._meter is not None:
            self._computed[request] = self._computed.get(request, 0) + tokens

    def ended(self, request: str) -> None:
        """Record that a request computes nothing more."""
        if request in self._computed or request in self._shares:
            self._ended.append(request)

    def settle(self) -> None:
        """Share the energy used since the window opened."""
        used = self._advance()
        total = sum(self._computed.values())
        for request, tokens in self._computed.items():
            self._shares[request] = self._shares.get(request, 0.0) + used * tokens / total
        self._computed.clear()
        for request in self._ended:
            share = self._shares.pop(request, None)
            if share is not None:
                self._metrics.request_energy(share)
        self._ended.clear()
        while len(self._shares) > _MOST_REQUESTS:
            del self._shares[next(iter(self._shares))]

    def _advance(self) -> float:
        """Count the energy used since the last reading, and return it."""
        if self._meter is None:
            return 0.0
        try:
            read = self._meter.joules()
        except Exception as error:
            log.warning("energy isn't counted any more: %s", error)
            self._meter = None
            # A partial reading gives no share.
            self._computed.clear()
            self._shares.clear()
            self._ended.clear()
            return 0.0
        # A driver that was loaded again counts from 0.
        used, self._read = max(0.0, read - self._read), read
        self._metrics.energy(used)
        return used


def open_account(
    metrics: EngineMetrics,
    devices: Callable[[], Sequence[str]],
    *,
    environment: Mapping[str, str] = os.environ,
    library: Callable[[], Nvml] | None = None,
) -> EnergyAccount | None:
    """Open an account, if the operator wants one and the GPUs count energy.

    Args:
        devices: the UUIDs of the engine's GPUs; none on a CPU.
        library: returns ``pynvml``; by default it is imported.

    Raises:
        EnergyUnavailableError: the operator insists, and energy can't be read.
        ValueError: the variable has an unknown value.
    """
    wish = environment.get(ENERGY_VARIABLE) or "auto"
    if wish not in ("off", "on", "auto"):
        raise ValueError(f"{ENERGY_VARIABLE} is off, on or auto, not {wish!r}")
    if wish == "off" or not metrics.collects:
        return None
    try:
        uuids = devices()
        if not uuids:
            raise EnergyUnavailableError("the engine runs on no NVIDIA GPU")
        return EnergyAccount(NvmlMeter((library or _pynvml)(), uuids), metrics)
    except Exception as error:
        if wish == "on":
            raise
        log.info("energy isn't counted: %s", error)
        return None


def _pynvml() -> Nvml:
    try:
        import pynvml
    except ImportError as error:
        raise EnergyUnavailableError("the package nvidia-ml-py isn't installed") from error
    library: Nvml = pynvml
    return library


def cuda_uuids(indices: Sequence[int]) -> list[str]:
    """Return the UUIDs of GPUs, as NVML writes them, by torch's own numbers."""
    import torch

    if not torch.cuda.is_available():
        return []
    known = torch.cuda.device_count()
    return [f"GPU-{torch.cuda.get_device_properties(i).uuid}" for i in indices if i < known]
