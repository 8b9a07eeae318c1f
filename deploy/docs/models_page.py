"""Writes docs/models.md: the models and recipes of SGLang's cookbook, and which of them splice.

The models' verdicts are measured (``python -m leyline_lab models``); a recipe's is that of the
plugin's own rule for a server's settings.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leyline_engine.sglang.facts.allow_list import Setup, refusals

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = REPOSITORY / "docs" / "models.md"
INTRODUCTION = Path(__file__).resolve().parent / "models-introduction.md"
VERDICTS = REPOSITORY / "docs" / "results" / "models.json"
COOKBOOK = REPOSITORY / "tests" / "fixtures" / "cookbook.json"
_SITE = "https://docs.sglang.io/cookbook/autoregressive"
_BY_KIND = {
    "sliding window": "layers that keep a sliding window's rows alone",
    "chunked": "chunked attention",
    "recurrent hybrid": "recurrent layers",
    "dsa": "sparse attention with an index key",
    "compressed": "compressed attention",
    "diffusion": "diffusion language model",
}
"""The reason for a page whose model was not measured, by the kind of its attention."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting of a server, and how it is tested with each kind of KV pool."""

    name: str
    setup: Setup
    tested: str
    """``server``: a real server on a CPU; ``parts``: SGLang's own tree, scheduler and pools,
    without a model; empty: not tested."""
    where: str
    """The test, below ``tests/sglang``."""


SETTINGS = (
    Setting("pages of 1 token", Setup(), "server", "test_splice_equality.py"),
    Setting("pages of 16 tokens", Setup(page_size=16), "server", "test_server_pages.py"),
    Setting("pages of 32 tokens", Setup(page_size=32), "parts", "test_scheduler_pages.py"),
    Setting("pages of 64 tokens", Setup(page_size=64), "server", "test_server_pages.py"),
    Setting("pages of 128 tokens", Setup(page_size=128), "server", "test_server_pages.py"),
    Setting("KV in bf16", Setup(), "parts", "test_pool_splice.py"),
    Setting("KV in fp8 (e4m3)", Setup(kv_dtype="float8_e4m3fn"), "server", "test_server_fp8.py"),
    Setting("KV in fp8 (e5m2)", Setup(kv_dtype="float8_e5m2"), "", ""),
    Setting("EAGLE, MTP (NEXTN)", Setup(speculative="EAGLE"), "server", "test_server_drafts.py"),
    Setting("EAGLE3", Setup(speculative="EAGLE3"), "server", "test_server_draft_mixes.py"),
    Setting("trees of drafts", Setup(speculative="EAGLE"), "server", "test_server_draft_mixes.py"),
    Setting(
        "trees of drafts in pages of several tokens",
        Setup(speculative="EAGLE", page_size=64, paged_trees=True),
        "",
        "",
    ),
    Setting("NGRAM", Setup(speculative="NGRAM"), "server", "test_server_drafts.py"),
    Setting("DFLASH", Setup(speculative="DFLASH"), "", ""),
    Setting("tensor parallel", Setup(), "server", "test_server_tensor_parallel.py"),
    Setting("data parallel", Setup(), "server", "test_server_data_parallel.py"),
    Setting("data-parallel attention", Setup(), "server", "test_server_data_parallel.py"),
    Setting("expert parallel", Setup(), "server", "test_server_draft_mixes.py"),
    Setting("mixed chunks", Setup(), "server", "test_server_mixed_chunk.py"),
    Setting("HiCache", Setup(host_layout="page_first"), "server", "test_server_hosted.py"),
    Setting("HiCache with a storage back end", Setup(host_storage=True), "", ""),
    Setting("LoRA", Setup(), "server", "test_server_adapters.py"),
    Setting("pipeline parallel", Setup(pipeline_parallel=2), "", ""),
    Setting("context parallel", Setup(context_parallel=2), "", ""),
    Setting("disaggregated prefill", Setup(disaggregation="prefill"), "", ""),
)
PAGES, FP8, DRAFTS, NGRAM = "larger pages", "FP8 KV", "draft model", "NGRAM"
REPLICAS, ATTENTION, EXPERTS = "data parallel", "data-parallel attention", "expert parallel"
HOSTED = "HiCache"
TOGETHER: tuple[tuple[frozenset[str], str], ...] = (
    (frozenset({PAGES, DRAFTS}), "sglang/test_server_drafts.py"),
    (frozenset({PAGES, NGRAM}), "sglang/test_server_drafts.py"),
    (frozenset({DRAFTS, FP8}), "sglang/test_server_draft_mixes.py"),
    (frozenset({DRAFTS, ATTENTION}), "sglang/test_server_draft_mixes.py"),
    (
        frozenset({PAGES, DRAFTS, ATTENTION, EXPERTS}),
        "sglang/test_server_draft_mixes.py",
    ),
    (
        frozenset({PAGES, FP8, DRAFTS, ATTENTION, EXPERTS}),
        "sglang/test_server_draft_mixes.py",
    ),
    (frozenset({PAGES, FP8}), "e2e/sglang/test_three_arm_bench.py"),
    (frozenset({PAGES, HOSTED}), "sglang/test_server_hosted.py"),
)
"""Settings that one real server on a CPU has in a test, below ``tests``."""
_ORDER = (PAGES, FP8, DRAFTS, NGRAM, REPLICAS, ATTENTION, EXPERTS, HOSTED)
_TESTED = {
    "server": "spliced, tested on a real server on a CPU",
    "parts": "spliced, tested on SGLang's tree, scheduler and pools without a model",
    "": "spliced, not tested here",
}


@dataclass(frozen=True, slots=True)
class Entry:
    """A page of the cookbook, with its verdict."""

    page: str
    models: tuple[str, ...]
    architecture: str
    splices: bool
    measured: bool
    reason: str
    recipes: tuple[Mapping[str, Any], ...]

    @property
    def spliced_recipes(self) -> int:
        """The number of its recipes under which the model splices."""
        return len(self._spliced)

    @property
    def untested(self) -> list[str]:
        """Settings that its spliced recipes combine and no test does, one entry per recipe."""
        return [name for recipe in self._spliced if (name := untested_together(recipe))]

    @property
    def _spliced(self) -> list[Mapping[str, Any]]:
        if not self.splices:
            return []
        return [recipe for recipe in self.recipes if not recipe_refusal(recipe)]


def entries() -> list[Entry]:
    """Return all pages in order."""
    verdicts = json.loads(VERDICTS.read_text(encoding="utf-8"))
    pages = json.loads(COOKBOOK.read_text(encoding="utf-8"))
    return [_entry(page, verdicts.get(page["config"])) for page in pages]


def _entry(page: Mapping[str, Any], verdict: Mapping[str, Any] | None) -> Entry:
    splices = bool(verdict and verdict["splices"])
    reason = "" if splices else _BY_KIND.get(page["attention"], "not tested here")
    if verdict and verdict["measured"] and not splices:
        reason = verdict["reason"]
    return Entry(
        page["page"],
        tuple(page["models"]),
        page["architecture"],
        splices,
        bool(verdict and verdict["measured"]),
        reason,
        tuple(page["recipes"]),
    )


def recipe_refusal(recipe: Mapping[str, Any]) -> str:
    """Return why a server with a recipe's settings can't splice a supported model; empty if it can.

    A recipe that gets other pages on other hardware counts by its largest. NGRAM drafts trees
    unless it is told not to.
    """
    hosted = bool(recipe.get("hicache"))
    speculative, page = str(recipe.get("speculative", "")), max(recipe.get("pages", [1]))
    return _refused(
        Setup(
            kv_dtype=_kv_dtype(str(recipe.get("kv_cache_dtype", "bfloat16"))),
            page_size=page,
            radix_cache=not recipe.get("radix_off", False),
            speculative=speculative,
            paged_trees=speculative == "NGRAM" and page > 1,
            host_layout="page_first" if hosted else "",
            host_drafts=hosted and bool(speculative),
            host_attention_dp=hosted and "dp_attention" in recipe,
            disaggregation="prefill" if recipe.get("disaggregation") else "null",
            pipeline_parallel=2 if recipe.get("pp") else 1,
            context_parallel=2 if recipe.get("context_parallel") else 1,
        )
    )


def untested_together(recipe: Mapping[str, Any]) -> str:
    """Return the settings of a recipe if no test has all of them on one server; else nothing.

    Tensor parallelism is left out: its ranks decide alike, whatever the other settings.
    """
    speculative = recipe.get("speculative", "")
    attention = bool(recipe.get("dp_attention"))
    has = {
        PAGES: max(recipe.get("pages", [1])) > 1,
        FP8: _kv_dtype(str(recipe.get("kv_cache_dtype", ""))) == "float8_e4m3fn",
        DRAFTS: speculative in {"EAGLE", "EAGLE3"},
        NGRAM: speculative == "NGRAM",
        REPLICAS: bool(recipe.get("dp")) and not attention,
        ATTENTION: attention,
        EXPERTS: bool(recipe.get("ep")),
        HOSTED: bool(recipe.get("hicache")),
    }
    settings = [name for name, applies in has.items() if applies]
    tested = len(settings) < 2 or any(together.issuperset(settings) for together, _ in TOGETHER)
    return "" if tested else " with ".join(settings)


def _refused(setup: Setup) -> str:
    return "; ".join(refused.what for refused in refusals(setup))


def _kv_dtype(name: str) -> str:
    return {"bf16": "bfloat16", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}.get(
        name, name
    )


def page() -> str:
    """Return the whole page."""
    return "\n".join(_lines(entries())) + "\n"


def _lines(found: list[Entry]) -> Iterator[str]:
    spliced = [entry for entry in found if entry.splices]
    recipes = sum(len(entry.recipes) for entry in spliced)
    served = sum(entry.spliced_recipes for entry in spliced)
    introduction = INTRODUCTION.read_text(encoding="utf-8").rstrip()
    yield (
        introduction.replace("$pages", str(len(found)))
        .replace("$spliced", str(len(spliced)))
        .replace("$recipes", str(recipes))
        .replace("$served", str(served))
        .replace("$together", str(served - sum(len(entry.untested) for entry in spliced)))
        .replace("$share", f"{100 * served / recipes:.0f}")
    )
    yield from _settings()
    yield from _together()
    yield "\n## Models that splice\n"
    yield "| page of the cookbook | class | recipes that splice |"
    yield "|---|---|---|"
    for entry in spliced:
        yield (
            f"| [{entry.page}]({_SITE}/{entry.page}) | `{entry.architecture}` | "
            f"{entry.spliced_recipes} of {len(entry.recipes)}{_others(entry)} |"
        )
    yield "\n## Models that are served without splicing\n"
    yield "| page of the cookbook | class | reason | |"
    yield "|---|---|---|---|"
    for entry in found:
        if not entry.splices:
            how = "measured" if entry.measured else "by its configuration"
            how = "" if entry.reason == "not tested here" else how
            yield (
                f"| [{entry.page}]({_SITE}/{entry.page}) | `{entry.architecture}` | "
                f"{entry.reason} | {how} |"
            )
    yield from _configurations()


def _settings() -> Iterator[str]:
    yield "\n| setting | | test |"
    yield "|---|---|---|"
    for setting in SETTINGS:
        reason = _refused(setting.setup)
        result = f"served without: {reason}" if reason else _TESTED[setting.tested]
        test = f"`{setting.where}`" if setting.where and not reason else ""
        yield f"| {setting.name} | {result} | {test} |"


def _together() -> Iterator[str]:
    yield "\n| settings together on one server | test |"
    yield "|---|---|"
    for settings, test in TOGETHER:
        ordered = [name for name in _ORDER if name in settings]
        yield f"| {', '.join(ordered)} | `{test}` |"


def _others(entry: Entry) -> str:
    reasons = sorted({reason for recipe in entry.recipes if (reason := recipe_refusal(recipe))})
    said = f"; others: {', '.join(reasons)}" if reasons else ""
    if entry.untested:
        mixes = ", ".join(sorted(set(entry.untested)))
        said += f"; {len(entry.untested)} not tested together: {mixes}"
    return said


def _configurations() -> Iterable[str]:
    verdicts = json.loads(VERDICTS.read_text(encoding="utf-8"))
    yield "\n## Measured configurations\n"
    yield (
        "Error: root of the mean square over a layer's keys, spliced rows against rows that the "
        "model computes at the new place, as a share of the keys'. Control: the least error of "
        "four wrong splices (no turn, the other pairing, one position off, half the band).\n"
    )
    yield "| configuration | class | rotation | error | control |"
    yield "|---|---|---|---|---|"
    for name, verdict in sorted(verdicts.items()):
        if not verdict["splices"]:
            continue
        rotary, errors = verdict["rotary"], dict(verdict["errors"])
        error = errors.pop("spliced")
        yield (
            f"| {name} ({verdict['dtype']}) | `{verdict['architecture']}` | "
            f"{rotary['rotary_dim']} dimensions, {rotary['pairing'].replace('_', '-')}, "
            f"{rotary['rope_type']} | {error:.0e} | {min(errors.values()):.0e} |"
        )


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
