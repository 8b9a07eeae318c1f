"""vLLM of a version that wasn't tested."""

from __future__ import annotations

import pytest
import vllm
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from leyline_engine.contract import VLLM, is_tested
from leyline_engine.vllm import plugin
from leyline_engine.vllm.server import http


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A process without Leyline's connector; the steps of its registration from now on."""
    done: list[str] = []
    monkeypatch.setattr(KVConnectorFactory, "_registry", {})
    for step in ("_hook_scheduler", "_hook_worker", "_hook_core"):
        monkeypatch.setattr(plugin, step, lambda step=step: done.append(step))
    monkeypatch.setattr(http, "register_http", lambda: done.append("register_http"))
    return done


def test_an_untested_vllm_gets_no_connector(
    bare: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is registered or hooked, and the error names both versions."""
    monkeypatch.setattr(vllm, "__version__", "0.33.0")
    with pytest.raises(plugin.UntestedVersionError, match=r"0\.32\.0, not with 0\.33\.0"):
        plugin.register()
    assert (KVConnectorFactory._registry, bare) == ({}, [])


def test_the_tested_vllm_gets_the_connector(bare: list[str]) -> None:
    """The installed version is the table's, and gets the connector and the hooks."""
    assert is_tested(VLLM, vllm.__version__)
    plugin.register()
    assert plugin.CONNECTOR in KVConnectorFactory._registry
    assert len(bare) == 4
