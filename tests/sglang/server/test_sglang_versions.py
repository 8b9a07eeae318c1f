"""SGLang of a version that wasn't tested."""

from __future__ import annotations

import logging
from importlib.metadata import version

import pytest
import sglang.version
from sglang.srt.mem_cache import registry
from sglang.srt.plugins.hook_registry import HookRegistry

from leyline_engine.contract import SGLANG, is_tested
from leyline_engine.sglang import plugin


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A process without Leyline's back end; the targets that are hooked from now on."""
    hooked: list[str] = []
    monkeypatch.setattr(registry, "_RADIX_CACHE_REGISTRY", {})
    monkeypatch.setattr(HookRegistry, "register", lambda target, *_: hooked.append(target))
    return hooked


def test_an_untested_sglang_serves_with_its_own_cache(
    bare: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its back end of that name is its own, nothing is hooked, and the log names both versions."""
    monkeypatch.setattr(sglang.version, "__version__", "0.6.0")
    with caplog.at_level(logging.ERROR):
        plugin.register()
    found = registry.get_radix_cache_factory(plugin.BACKEND)
    assert found is registry.default_radix_cache_factory
    assert bare == []
    assert "0.5.23, not with 0.6.0" in caplog.text


def test_the_tested_sglang_is_extended(bare: list[str]) -> None:
    """The installed version is the table's, and gets the cache and the hooks."""
    assert is_tested(SGLANG, version("sglang"))
    plugin.register()
    assert registry.get_radix_cache_factory(plugin.BACKEND) is plugin.create_cache
    assert bare
