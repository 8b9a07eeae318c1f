"""The judgement on versions of proxy, plugin and engine, and the table that it reads."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path
from re import MULTILINE, findall

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from leyline_engine.contract import (
    PROTOCOL_VERSION,
    RELEASES,
    SGLANG,
    THIS_RELEASE,
    VLLM,
    Capability,
    Mismatch,
    MismatchReason,
    Plugin,
    Release,
    engine_versions,
    is_tested,
    judge,
    this_plugin,
)

ROOT = Path(__file__).parents[4]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PAGE = ROOT / "docs" / "compatibility.md"
FITTING = Capability(
    engine=SGLANG,
    engine_version="sglang 0.5.23",
    model="m",
    model_fingerprint="f",
    architecture="a",
    vocab_size=1,
    max_context=1,
    splices=True,
    actions=("leyline.edit@1.0",),
    plugin=this_plugin(),
)
OLD = Release(version="1.2.0", plugins=">=1.0", proxies=">=1.0", engines={SGLANG: ("0.5.20",)})
NEW = replace(OLD, version="2.0.0", plugins=">=1.2", proxies=">=1.1", engines={SGLANG: ("0.5.23",)})
VERSIONS = st.tuples(*[st.integers(0, 3)] * 3).map(lambda parts: ".".join(map(str, parts)))
BOUNDS = VERSIONS.map(lambda version: f">={version}")


def of(plugin: str = "", proxies: str = "", **facts: object) -> Capability:
    """The document of a plugin, of an engine without tested versions unless it is given."""
    usual: dict[str, object] = {"engine": "replay", "engine_version": "replay 1"}
    stated = Plugin(version=plugin, proxies=proxies)
    return msgspec.structs.replace(FITTING, plugin=stated, **(usual | facts))


def numbers(version: str) -> list[int]:
    """The numbers of a version, or of its lower bound."""
    return [int(part) for part in version.removeprefix(">=").split(".")]


def reason(found: Mismatch | None) -> MismatchReason | None:
    """The reason alone."""
    return None if found is None else found.reason


@given(VERSIONS, VERSIONS, BOUNDS, BOUNDS)
def test_the_newer_side_decides(ours: str, theirs: str, plugins: str, proxies: str) -> None:
    """The statement of the newer side is followed, whatever the older one states."""
    proxy = replace(OLD, version=ours, plugins=plugins)
    found = reason(judge(of(theirs, proxies), proxy, (proxy,)))
    mine, other = numbers(ours), numbers(theirs)
    expected = None
    if other > mine and mine < numbers(proxies):
        expected = MismatchReason.PROXY_TOO_OLD
    if other < mine and other < numbers(plugins):
        expected = MismatchReason.PLUGIN_TOO_OLD
    assert found is expected


@pytest.mark.parametrize(
    ("theirs", "ours", "plugins", "proxies", "expected"),
    [
        ("0.9.0", "0.10.0", ">=0.10.0", "", MismatchReason.PLUGIN_TOO_OLD),
        ("0.10.0", "0.9.0", "", ">=0.10.0", MismatchReason.PROXY_TOO_OLD),
        ("0.10.0", "0.11.0", ">=0.9", "", None),
        ("1.9.8", "2.0.0", ">=1.2,<1.9.9", "", None),
        ("1.9.9", "2.0.0", ">=1.2,<1.9.9", "", MismatchReason.PLUGIN_TOO_OLD),
        ("2.0.0", "1.9.9", "", ">=1.2,<1.9.9", MismatchReason.PROXY_TOO_OLD),
        ("1.3.0rc1", "2.0.0", ">=1.2", "", None),
        ("2.0.0", "2.0.0", ">=2.0", "every proxy", None),
    ],
    ids=str,
)
def test_versions_are_compared_as_versions(
    theirs: str, ours: str, plugins: str, proxies: str, expected: MismatchReason | None
) -> None:
    """By their numbers, not as texts; the upper end of a range is outside it, a candidate for a
    release inside, and equal versions fit whatever they state."""
    proxy = replace(OLD, version=ours, plugins=plugins)
    assert reason(judge(of(theirs, proxies), proxy, (proxy,))) is expected


@given(st.text(max_size=200), st.text(max_size=200), st.text(max_size=200), st.text(max_size=200))
def test_any_document_gets_a_judgement(
    version: str, proxies: str, contract: str, engine: str
) -> None:
    """Nothing that an engine states raises an error, or makes a message long."""
    for stated in (PROTOCOL_VERSION, contract):
        found = judge(
            of(version, proxies, protocol_version=stated, engine=SGLANG, engine_version=engine)
        )
        assert found is None or (found.fix and len(str(found)) < 900)


@pytest.mark.parametrize(
    ("version", "proxies"), [("two", ""), ("1.2.0 or so", ""), ("3.0", "every proxy")]
)
def test_a_version_that_cannot_be_read_is_a_mismatch(version: str, proxies: str) -> None:
    """A plugin's version or statement that isn't one is named, and never taken for a fit."""
    assert reason(judge(of(version, proxies), NEW, (NEW, OLD))) is MismatchReason.UNREADABLE


def test_a_newer_plugin_that_states_nothing_is_judged_by_the_contract() -> None:
    """Without its statement, the version of the contract decides."""
    assert judge(of("9.0"), NEW, (NEW, OLD)) is None
    other = judge(of("9.0", protocol_version="0.2"), NEW, (NEW, OLD))
    assert reason(other) is MismatchReason.CONTRACT


def test_a_plugin_before_versions_were_stated_is_the_earliest_release() -> None:
    """Its document lacks the fields; its engine is judged by the table's last row."""
    bare = msgspec.to_builtins(of(engine=SGLANG, engine_version="sglang 0.5.20"))
    del bare["plugin"]
    early = msgspec.convert(bare, Capability)
    assert judge(early, NEW, (NEW, OLD)) is None
    later = msgspec.structs.replace(early, engine_version="sglang 0.5.23")
    assert reason(judge(later, NEW, (NEW, OLD))) is MismatchReason.ENGINE_UNTESTED


@pytest.mark.parametrize(
    ("plugin", "engine", "expected"),
    [
        ("2.0.0", "0.5.23", None),
        ("2.0.0", "0.5.23+cu128", None),
        ("2.0.0", "0.5.23.post1", MismatchReason.ENGINE_UNTESTED),
        ("2.0.0", "0.5.20", MismatchReason.ENGINE_UNTESTED),
        ("1.2.0", "0.5.20", None),
        ("1.2.0", "0.5.23", MismatchReason.ENGINE_UNTESTED),
        ("2.1.0", "0.6", None),
        ("1.3.0", "0.6", None),
    ],
)
def test_an_engine_is_judged_by_the_row_of_its_plugin(
    plugin: str, engine: str, expected: MismatchReason | None
) -> None:
    """Each release has its own tested versions; a plugin without a row judges its engine itself."""
    document = of(plugin, engine=SGLANG, engine_version=f"sglang {engine}")
    assert reason(judge(document, NEW, (NEW, OLD))) is expected


def test_a_mismatch_names_both_versions_and_a_fix() -> None:
    """An operator reads what to install on which side."""
    old = judge(of("1.1.0"), NEW, (NEW, OLD))
    assert old is not None and "2.0.0" in old.detail and "1.1.0" in old.detail
    assert old.fix == "upgrade the plugin beside the engine to Leyline 2.0.0"
    new = judge(of("3.0", ">=2.5"), NEW, (NEW, OLD))
    assert new is not None and ">=2.5" in new.detail and "2.0.0" in new.detail
    assert new.fix == "upgrade this proxy to Leyline 3.0"
    engine = judge(of("2.0.0", engine=SGLANG, engine_version="sglang 0.6"), NEW, (NEW, OLD))
    assert engine is not None and "0.5.23" in engine.fix and "0.6" in engine.detail


def test_an_engine_that_splices_takes_this_versions_edits() -> None:
    """A document without the edit action fits only if nothing is spliced anyway."""
    assert reason(judge(of("2.0.0", actions=()), NEW, (NEW,))) is MismatchReason.EDIT_ACTION
    assert judge(of("2.0.0", actions=(), splices=False), NEW, (NEW,)) is None


def test_an_engine_is_named_once() -> None:
    """The engine's name isn't repeated if its version has it."""
    assert FITTING.engine_label == "sglang 0.5.23"
    assert of(engine_version="transformers 5.1").engine_label == "replay transformers 5.1"


def test_the_first_row_is_the_product() -> None:
    """The project's version has a row, and it is this release's own."""
    assert THIS_RELEASE.version == PROJECT["version"]
    assert this_plugin().version == PROJECT["version"]
    assert THIS_RELEASE.contract == PROTOCOL_VERSION


def test_the_rows_are_well_formed() -> None:
    """Releases fall in version, and each works with itself on both sides."""
    versions = [Version(release.version) for release in RELEASES]
    assert versions == sorted(set(versions), reverse=True)
    for release in RELEASES:
        for stated in (release.plugins, release.proxies):
            assert SpecifierSet(stated).contains(release.version, prereleases=True)


@pytest.mark.parametrize("engine", [SGLANG, VLLM])
def test_the_wheel_installs_the_tested_engine(engine: str) -> None:
    """The extra of an engine pins a version of the table."""
    (pin,) = PROJECT["optional-dependencies"][engine]
    assert pin == f"{engine}=={engine_versions(engine)[0]}"
    assert is_tested(engine, pin.partition("==")[2])


def test_the_page_has_the_tables_rows() -> None:
    """docs/compatibility.md lists each release, and each reason with its meaning."""
    text = PAGE.read_text(encoding="utf-8")
    rows = [
        f"| {each.version} | `{each.plugins}` | `{each.proxies}` | {each.contract} "
        f"| {', '.join(each.engines[SGLANG])} | {', '.join(each.engines[VLLM])} |"
        for each in RELEASES
    ]
    assert [line for line in text.splitlines() if line.startswith(("| 0", "| 1"))] == rows
    assert findall(r"^\| `([a-z_]+)` \|", text, flags=MULTILINE) == [
        each.value for each in MismatchReason
    ]
